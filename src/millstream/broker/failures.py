"""Error replies by category: the typed error that a reply means, and whether a retry can help."""

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
    "NOAUTH": (AuthenticationFailed, "Put the password into the URL."),
    "WRONGPASS": (AuthenticationFailed, "Check the user and the password in the URL."),
    "NOPERM": (PermissionDenied, "Grant the ACL user this command and key: ACL SETUSER user +command ~key."),
    "OOM": (OutOfMemory, "Nothing was stored. Trim streams, or raise maxmemory."),
    "LOADING": (ServerLoading, "Try again when the server has loaded its data."),
    "READONLY": (ReadOnlyReplica, "Connect to the primary, or use a redis+sentinel:// URL, which finds it."),
    "NOREPLICAS": (
        partial(ServerError, retryable=True),
        "Nothing was stored. Start replicas until there are min-replicas-to-write of them, or lower that setting.",
    ),
    "MISCONF": (
        partial(ServerError, retryable=True),
        "Nothing was stored. The server cannot write to its disk: free space there, or read its log.",
    ),
    "UNWRITTEN": (
        partial(BrokerUnavailable, may_have_been_applied=True),
        "Check whether it was applied before you repeat it, or use append_once.",
    ),
    "NOGROUP": (NoSuchGroup, "Create it with create_group(stream, group, start=...)."),
    "BUSYGROUP": (GroupExists, "Use it as it is, or pass exist_ok=True."),
    "STALEOWNER": (StaleOwner, "Nothing was written: another member owns the stream now. Stop processing it."),
    "WRONGTYPE": (WrongKeyType, "The key holds something other than this operation works on: choose another name."),
}

TRANSIENT = frozenset(
    {"OOM", "LOADING", "READONLY", "BUSY", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "NOREPLICAS"}
    | {"MISCONF", "UNBLOCKED"}
)
"""Errors of commands that the server did not execute. A retry before the deadline may succeed."""

REPLACED = frozenset({"READONLY", "MASTERDOWN", "NOREPLICAS", "CLUSTERDOWN", "UNBLOCKED"})
"""Errors of a node that is no longer the primary, or that is partitioned and does not know about a new primary. Before
the next try the transport asks for the primary again.
"""

ID_TOO_SMALL = (
    "ERR The ID specified in XADD",
    "ERR The ID specified in XSETID",
    "ERR The stream has exhausted the last possible ID",
)
UNAUTHENTICATED_TOO_LARGE = "ERR Protocol error: unauthenticated"
"""The start of the reply to a large command of a client that has not authenticated."""
SCRIPT_LOCATION = re.compile(r" script: \w+, on @user_script:\d+\.$")
"""The position in a script that Redis appends to an error; a caller cannot use it."""
ABORTED = "EXECABORT Transaction discarded because of: "
"""What EXEC puts before the error for which it was rejected itself."""
INVALID_ID = "ERR Invalid stream ID specified as stream command argument"
NO_SUCH_KEY = ("ERR no such key", "ERR The XGROUP subcommand requires the key to exist")


def code_of(error: ErrorReply) -> str:
    """The error code: the first word of the reply."""
    return error.text.removeprefix(ABORTED).split(" ", 1)[0]


def typed_error(error: ErrorReply) -> MillstreamError:
    """The typed error that a caller receives for this error reply."""
    text = SCRIPT_LOCATION.sub("", error.text.removeprefix(ABORTED))
    code = text.split(" ", 1)[0]
    if known := ADVICE.get(code):
        kind, advice = known
        return kind(f"{text.rstrip('.')}. {advice}")
    if text.startswith(UNAUTHENTICATED_TOO_LARGE):
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
    # A redirection that was followed until the deadline: the cluster is being resharded.
    return ServerError(text, retryable=code in TRANSIENT or code in ("MOVED", "ASK"))
