"""Every error that this package raises, under one root.

An error carries its facts as attributes, says whether trying again can help (``retryable``), and has a message that
ends with what to do next. All of them pickle, because Spark and process pools carry them between processes.
A room with errors of its own keeps them in ``<room>/errors.py``, derived from here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar


def _rebuild(kind: type[MillstreamError], message: str, facts: dict[str, Any]) -> MillstreamError:
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    error.__dict__.update(facts)
    return error


class MillstreamError(Exception):
    """The root. ``except MillstreamError`` catches whatever goes wrong in this package's name."""

    retryable: ClassVar[bool] = False

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.__dict__.update(facts)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args[0], dict(self.__dict__))


# --- what the caller got wrong: nothing was changed ---------------------------------------------------------------


class InvalidArgument(MillstreamError):
    """An argument is not what it may be. ``argument`` names it, ``allowed`` says what it may be."""

    argument: str
    allowed: str

    def __init__(self, argument: str, got: object, allowed: str) -> None:
        try:
            shown = repr(got)
        except Exception:  # a number of 5,000 digits, or a stranger's class: this error must not become another one
            shown = f"this {type(got).__name__}"
        if len(shown) > 80:
            shown = shown[:77] + "..."
        end = "" if allowed.endswith("?") else "."
        super().__init__(f"{argument}: {shown} is not allowed. Use {allowed}{end}", argument=argument, allowed=allowed)


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """The nearest of the words that would have been right, as the end of a sentence; empty where none is near."""
    import difflib  # only those who made a mistake wait for it

    close = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


class PayloadTooLarge(InvalidArgument):
    """One entry is larger than the limit in force."""

    def __init__(self, argument: str, size: int, limit: int) -> None:
        super().__init__(argument, f"{size} bytes", f"at most {limit} bytes, or raise the limit")
        self.size = size
        self.limit = limit


class BrokerClosed(MillstreamError):
    """The broker was closed, or belongs to the parent of a forked process."""


# --- what stands between the caller and the server ------------------------------------------------------------------


class BrokerUnavailable(MillstreamError):
    """The server could not be reached, or did not answer, until the deadline.

    ``may_have_been_applied`` is true when a command was sent and its answer never came, or when an embedded broker has
    done it and its disk did not take it (yet): it may or may not be stored.
    Only an idempotent write (``append_once``) may then be repeated blindly.
    """

    retryable = True
    may_have_been_applied: bool

    def __init__(self, message: str, *, may_have_been_applied: bool = False) -> None:
        super().__init__(message, may_have_been_applied=may_have_been_applied)


class TLSFailed(MillstreamError):
    """A certificate, a key, or TLS where the other side speaks none (or the other way round). Never retried."""


class AuthenticationFailed(MillstreamError):
    """NOAUTH or WRONGPASS. Never retried."""


class PermissionDenied(MillstreamError):
    """NOPERM: the ACL user may not do this. Never retried."""


class OutOfMemory(MillstreamError):
    """OOM: the server is at maxmemory and refused the write as a whole."""

    retryable = True


class ServerLoading(MillstreamError):
    """LOADING: the server is reading its data set."""

    retryable = True


class ReadOnlyReplica(MillstreamError):
    """READONLY: this node is a replica (now). The link looks for the new primary."""

    retryable = True


class ServerTooOld(MillstreamError):
    """The server answered without a fact that servers tell since Redis 7.0. ``fact`` names it."""

    fact: str

    def __init__(self, fact: str) -> None:
        super().__init__(
            f"the server does not tell {fact!r}, as Redis does since 7.0: it is older than that, or leaves it out. "
            "Use Redis 7.0 or newer; `millstream verify` tells what else a server lacks.",
            fact=fact,
        )


class DurabilityUnavailable(MillstreamError):
    """The server cannot give the durability that the write asked for. ``wanted`` names it.

    ``stored``: the write is there, and was only not confirmed in time. One that is known when it is repeated
    (``append_once``, ``append_unique``) may be repeated until it is confirmed.
    """

    wanted: str
    stored: bool

    def __init__(self, wanted: str, why: str, *, stored: bool = False) -> None:
        super().__init__(f"durability {wanted!r} is not available: {why}", wanted=wanted, stored=stored)


class ServerError(MillstreamError):
    """The server refused a command for a reason that has no error of its own. ``code`` is the reply's first word.

    ``retryable`` where the reason may pass: too few replicas (NOREPLICAS), a cluster that is down, a script that runs.
    """

    code: str

    def __init__(self, text: str, *, retryable: bool = False) -> None:
        super().__init__(text, code=text.split(" ", 1)[0], retryable=retryable)


# --- what the data says ---------------------------------------------------------------------------------------------


class NoSuchStream(MillstreamError):
    """The stream does not exist, and the operation does not create it."""


class NoSuchGroup(MillstreamError):
    """NOGROUP: the stream or its consumer group does not exist (any more)."""


class GroupExists(MillstreamError):
    """BUSYGROUP: a group of this name exists, and ``exist_ok`` is false."""


class WrongKeyType(MillstreamError):
    """WRONGTYPE: the key holds something other than a stream."""


class IdTooSmall(MillstreamError):
    """The given id is not greater than the last one in the stream."""


class ConsumerHasPending(MillstreamError):
    """The consumer still owns pending entries; deleting it would throw them away. ``pending`` counts them."""

    pending: int

    def __init__(self, consumer: str, pending: int) -> None:
        super().__init__(
            f"consumer {consumer!r} still has {pending} pending entries, which would be lost. "
            "Pass to=<other consumer> to hand them over first.",
            consumer=consumer,
            pending=pending,
        )


class StaleWriter(MillstreamError):
    """append_once was refused: this writer's version is behind what the stream has recorded (a zombie)."""


class NonDeterministicReplay(MillstreamError):
    """append_once was given the same version again, with other entries than those that are stored."""


class StaleOwner(MillstreamError):
    """A guarded write was refused: the lease's token is not the owner's any more."""


# --- the embedded broker's files ------------------------------------------------------------------------------------


class DirectoryLocked(MillstreamError):
    """Another process has this data directory open. ``pid`` names it where it is known."""

    path: str
    pid: int | None


class JournalNotWritten(MillstreamError):
    """A durable broker was closed, and what was outstanding could not be written or synced. ``path`` is the journal.

    What was refused stays refused; what was answered since the last sync may not be on the disk.
    """

    path: str


class JournalCorrupt(MillstreamError):
    """The journal cannot be read at ``offset``, and the fault is not a torn tail. Nothing was read over."""

    path: str
    offset: int
