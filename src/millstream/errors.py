"""Every error that this package raises, derived from ``MillstreamError``.

An error carries its details as attributes, says whether a retry can help (``retryable``), and has a message that ends
with what to do next. All errors can be pickled, because Spark and process pools send them between processes. A package
with errors of its own defines them in ``<package>/errors.py``, derived from this root."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar


def _rebuild(kind: type[MillstreamError], message: str, details: dict[str, Any]) -> MillstreamError:
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    error.__dict__.update(details)
    return error


class MillstreamError(Exception):
    """The base class: ``except MillstreamError`` catches every error that millstream raises."""

    retryable: ClassVar[bool] = False

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.__dict__.update(details)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args[0], dict(self.__dict__))


# --- mistakes of the caller: nothing was changed -------------------------------------------------------------------


class InvalidArgument(MillstreamError):
    """An argument has a value that is not allowed: ``argument`` is its name, ``allowed`` describes the allowed
    values.
    """

    argument: str
    allowed: str

    def __init__(self, argument: str, got: object, allowed: str) -> None:
        try:
            value = repr(got)
        except Exception:  # repr fails for an int of more than 4,300 digits, and may fail for a class of the caller
            value = f"this {type(got).__name__}"
        if len(value) > 80:
            value = value[:77] + "..."
        end = "" if allowed.endswith("?") else "."
        super().__init__(f"{argument}: {value} is not allowed. Use {allowed}{end}", argument=argument, allowed=allowed)


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """The known name that is most similar to ``word``, as the end of an error message; empty if none is similar."""
    import difflib  # imported on demand: it is needed only for an error message

    close = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


class PayloadTooLarge(InvalidArgument):
    """An entry is larger than the configured limit."""

    def __init__(self, argument: str, size: int, limit: int) -> None:
        super().__init__(argument, f"{size} bytes", f"at most {limit} bytes, or raise the limit")
        self.size = size
        self.limit = limit


class BrokerClosed(MillstreamError):
    """The broker was closed, or belongs to the parent of a forked process."""


# --- the connection to the server, and what the server refuses ------------------------------------------------------


class BrokerUnavailable(MillstreamError):
    """The server could not be reached, or did not answer, before the deadline.

    ``may_have_been_applied`` is True if the result is ambiguous: a command was sent and no reply came, or an embedded
    broker applied the change but could not write it to disk yet. In that case, repeat only idempotent writes such as
    ``append_once`` without a check."""

    retryable = True
    may_have_been_applied: bool

    def __init__(self, message: str, *, may_have_been_applied: bool = False) -> None:
        super().__init__(message, may_have_been_applied=may_have_been_applied)


class TLSFailed(MillstreamError):
    """The TLS handshake cannot succeed: a bad certificate or key, or only one side uses TLS. Never retried."""


class AuthenticationFailed(MillstreamError):
    """The server replied NOAUTH or WRONGPASS. Never retried."""


class PermissionDenied(MillstreamError):
    """NOPERM: the ACL user may not run this command or access this key. Never retried."""


class OutOfMemory(MillstreamError):
    """OOM: the server has reached maxmemory and refused the write. Nothing of the command was applied."""

    retryable = True


class ServerLoading(MillstreamError):
    """LOADING: the server is still reading its data set from disk."""

    retryable = True


class ReadOnlyReplica(MillstreamError):
    """READONLY: this node is now a replica. The transport looks for the new primary."""

    retryable = True


class ServerTooOld(MillstreamError):
    """The server's reply lacks a field that Redis has reported since 7.0. ``fact`` is the name of the field."""

    fact: str

    def __init__(self, fact: str) -> None:
        super().__init__(
            f"the server does not report {fact!r}, which Redis has reported since 7.0. "
            "Use Redis 7.0 or newer; `millstream verify` lists what else a server lacks.",
            fact=fact,
        )


class DurabilityUnavailable(MillstreamError):
    """The server cannot give the durability that the write asked for. ``wanted`` is that durability.

    ``stored`` is True if the write was applied and only its confirmation did not come in time. An idempotent write
    (``append_once``, ``append_unique``) may then be repeated until it is confirmed."""

    wanted: str
    stored: bool

    def __init__(self, wanted: str, why: str, *, stored: bool = False) -> None:
        super().__init__(f"durability {wanted!r} is not available: {why}", wanted=wanted, stored=stored)


class ServerError(MillstreamError):
    """The server returned an error that has no class of its own. ``code`` is the first word of the error reply.

    ``retryable`` is True for transient errors: too few replicas (NOREPLICAS), a cluster that is down, a script that
    still runs."""

    code: str

    def __init__(self, text: str, *, retryable: bool = False) -> None:
        super().__init__(text, code=text.split(" ", 1)[0], retryable=retryable)


# --- streams, groups and writers ------------------------------------------------------------------------------------


class NoSuchStream(MillstreamError):
    """The stream does not exist, and the operation does not create it."""


class NoSuchGroup(MillstreamError):
    """NOGROUP: the stream or its consumer group does not exist, or was deleted."""


class GroupExists(MillstreamError):
    """BUSYGROUP: a group of this name exists already, and ``exist_ok`` is False."""


class WrongKeyType(MillstreamError):
    """WRONGTYPE: the key holds something other than a stream."""


class IdTooSmall(MillstreamError):
    """The given id is not greater than the last id of the stream."""


class ConsumerHasPending(MillstreamError):
    """The consumer still has pending entries, which its deletion would lose. ``pending`` is their number."""

    pending: int

    def __init__(self, consumer: str, pending: int) -> None:
        super().__init__(
            f"consumer {consumer!r} still has {pending} pending entries, which would be lost. "
            "Pass to=<other consumer> to move them to that consumer, or discard=True to drop them.",
            consumer=consumer,
            pending=pending,
        )


class GroupInUse(MillstreamError):
    """The group has consumers or pending entries, so a query's progress cannot become its position.

    Those consumers would never receive the entries that the position moves past."""

    group: str
    stream: str

    def __init__(self, group: str, stream: str) -> None:
        super().__init__(
            f"group {group!r} of stream {stream!r} has consumers or pending entries; publishing a query's progress as "
            "its position would skip their entries. Set option group to a name that no consumer uses.",
            group=group,
            stream=stream,
        )


class StaleWriter(MillstreamError):
    """``append_once`` was refused: a newer version of this writer has already written to the stream."""


class NonDeterministicReplay(MillstreamError):
    """``append_once`` was called again with the same version, but with rows that differ from the stored ones."""


class StaleOwner(MillstreamError):
    """A fenced write was refused: the fencing token is not the current owner's any more."""


# --- the embedded broker's files ------------------------------------------------------------------------------------


class DirectoryLocked(MillstreamError):
    """Another process has this data directory open. ``pid`` is that process, if it is known."""

    path: str
    pid: int | None


class JournalNotWritten(MillstreamError):
    """A durable broker was closed, but its last changes could not be written or synced. ``path`` is the journal.

    Commands that returned an error were not applied. Commands that succeeded since the last sync may be lost."""

    path: str


class JournalCorrupt(MillstreamError):
    """The journal cannot be read at ``offset``, and the damage is not just an incomplete last record. Nothing was
    loaded."""

    path: str
    offset: int
