"""Failures by kind: which error a reply means, and whether asking again can help.

In: an error reply's text. Out: a typed error, or the word that the links' retry policy decides by.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from millstream.errors import (
    AuthenticationFailed,
    BrokerUnavailable,
    GroupExists,
    IdTooSmall,
    InvalidArgument,
    MillstreamError,
    NoSuchGroup,
    NoSuchStream,
    OutOfMemory,
    PermissionDenied,
    ReadOnlyReplica,
    ServerError,
    ServerLoading,
    StaleOwner,
    WrongKeyType,
)
from millstream.wire import ErrorReply

ADVICE: dict[str, tuple[Callable[[str], MillstreamError], str]] = {
    "NOAUTH": (AuthenticationFailed, "Put the password into the URL or into MILLSTREAM_URL."),
    "WRONGPASS": (AuthenticationFailed, "Check the user and the password in the URL."),
    "NOPERM": (PermissionDenied, "Grant the ACL user this command and key: ACL SETUSER user +command ~key."),
    "OOM": (OutOfMemory, "Nothing was stored. Trim streams, or raise maxmemory."),
    "LOADING": (ServerLoading, "Try again when the server has read its data."),
    "READONLY": (ReadOnlyReplica, "Connect to the primary, or use a redis+sentinel:// URL, which finds it."),
    "NOREPLICAS": (
        partial(ServerError, retryable=True),
        "Nothing was stored. Bring replicas back until there are min-replicas-to-write of them, or lower that setting.",
    ),
    "MISCONF": (
        partial(ServerError, retryable=True),
        "Nothing was stored. The server cannot write to its disk: make room there, or see its log.",
    ),
    "UNWRITTEN": (
        partial(BrokerUnavailable, may_have_been_applied=True),
        "Look before you repeat it, or use append_once.",
    ),
    "NOGROUP": (NoSuchGroup, "Create it with create_group(stream, group, start=...)."),
    "BUSYGROUP": (GroupExists, "Use it as it is, or pass exist_ok=True."),
    "STALEOWNER": (StaleOwner, "Nothing was done: the stream is another member's by now. Stop working on it."),
    "WRONGTYPE": (WrongKeyType, "The key holds something other than this operation works on: choose another name."),
}

TRANSIENT = frozenset(
    {"OOM", "LOADING", "READONLY", "BUSY", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "NOREPLICAS"}
    | {"MISCONF", "UNBLOCKED"}
)
"""The server refused without doing anything, and the reason may pass: worth another try before the deadline."""

REPLACED = frozenset({"READONLY", "MASTERDOWN", "NOREPLICAS", "CLUSTERDOWN", "UNBLOCKED"})
"""What a node says that is no primary any more, or that was cut off from the others and does not know yet that they
have another one: before the next try the link asks again whose turn it is."""

ID_TOO_SMALL = (
    "ERR The ID specified in XADD",
    "ERR The ID specified in XSETID",
    "ERR The stream has exhausted the last possible ID",
)
TOO_LARGE_FOR_A_STRANGER = "ERR Protocol error: unauthenticated"
"""The answer to a command of more than a few words from someone who has not logged in."""
SCRIPT_PLACE = re.compile(r" script: \w+, on @user_script:\d+\.$")
"""Where in a script the server was when it refused: of no use to a caller."""
ABORTED = "EXECABORT Transaction discarded because of: "
"""What EXEC says before the reason for which it was refused itself."""
INVALID_ID = "ERR Invalid stream ID specified as stream command argument"
NO_SUCH_KEY = ("ERR no such key", "ERR The XGROUP subcommand requires the key to exist")


def code_of(error: ErrorReply) -> str:
    return error.text.removeprefix(ABORTED).split(" ", 1)[0]


def typed(error: ErrorReply) -> MillstreamError:
    """The error that a caller sees for this reply."""
    text = SCRIPT_PLACE.sub("", error.text.removeprefix(ABORTED))
    code = text.split(" ", 1)[0]
    if known := ADVICE.get(code):
        kind, advice = known
        return kind(f"{text.rstrip('.')}. {advice}")
    if text.startswith(TOO_LARGE_FOR_A_STRANGER):
        return AuthenticationFailed(f"{text}. {ADVICE['NOAUTH'][1]}")
    if text.startswith(ID_TOO_SMALL):
        return IdTooSmall(f"{text.rstrip('.')}. Use '*', or an id greater than the stream's last one.")
    if text.startswith(NO_SUCH_KEY):
        return NoSuchStream(f"{text.rstrip('.')}. Add an entry or create a group first.")
    if text.startswith(INVALID_ID):
        return InvalidArgument(
            "id", "an id of this call", "ids such as 1526919030474-55, of two whole numbers of 64 bits"
        )
    if code == "CROSSSLOT":
        return InvalidArgument("streams", text, "streams with one hash tag, such as {orders}.a and {orders}.b")
    # A redirection that was followed until the deadline: the cluster is still being rearranged.
    return ServerError(text, retryable=code in TRANSIENT or code in ("MOVED", "ASK"))
