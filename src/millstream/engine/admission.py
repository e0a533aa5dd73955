"""Checks before a command of a special session runs: authentication, MULTI, memory limit, subscriptions, MONITOR.

The checks run in Redis's order and change no data. A rejected command marks an open transaction as failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from millstream.engine.registry import Flag, Spec
from millstream.engine.session import BLOCKED
from millstream.wire import QUEUED, ErrorReply, Reply, Several, Status

if TYPE_CHECKING:
    from millstream.engine.session import Session

NO_AUTH = int(Flag.NO_AUTH)
NO_MULTI = int(Flag.NO_MULTI)
DENY_OOM = int(Flag.DENY_OOM)
WHILE_SUBSCRIBED = int(Flag.WHILE_SUBSCRIBED)
NOT_QUEUED = int(Flag.NOT_QUEUED)
ADMIN = int(Flag.ADMIN)

MAX_QUEUE_BYTES: Final = 256 << 20
"""Approximate limit on the memory of the commands between MULTI and EXEC."""
QUEUED_COMMAND_OVERHEAD_BYTES: Final = 400

OUT_OF_MEMORY = "OOM command not allowed when used memory > 'maxmemory'."


def reject(session: Session, spec: Spec | None, text: str) -> Reply:
    """Rejects a command before it runs, and returns the error reply."""
    engine = session.engine
    if spec is not None and spec.name == "EXEC":  # without MULTI too
        text = f"EXECABORT Transaction discarded because of: {text.removeprefix('ERR ')}"
        discard(session)
    elif session.queue is not None:
        session.queue_failed = True
    if spec is not None:
        spec.rejected += 1
    engine.stats.count_error(text)
    if session.muted or session.skip_reply:
        session.skip_reply = False
        session.refresh()
        return Several()
    return ErrorReply(text)


def discard(session: Session) -> None:
    """Ends the open transaction and unwatches all keys."""
    session.queue = None
    session.queue_failed = False
    session.queue_bytes = 0
    session.engine.unwatch(session)
    session.refresh()


def admit(session: Session, spec: Spec, args: Sequence[bytes]) -> Reply | None:
    """Returns the reply if the command is rejected, queued, or executed without a reply; None if it is to run now."""
    if session.muted or session.skip_reply:
        return _execute_without_reply(session, args)
    rejection = _rejection(session, spec)
    if rejection is not None:
        return reject(session, spec, rejection)
    if session.queue is not None and not spec.bits & NOT_QUEUED:
        return _queue(session, session.queue, spec, args)
    if session.engine.monitors and spec.name != "EXEC":
        feed_monitors(session, spec, args)
    return None


def _queue(session: Session, queue: list[tuple[Spec, Sequence[bytes]]], spec: Spec, args: Sequence[bytes]) -> Reply:
    if session.queue_failed:
        return QUEUED  # EXEC will fail, so the command is not stored
    session.queue_bytes += QUEUED_COMMAND_OVERHEAD_BYTES + sum(map(len, args))
    if session.queue_bytes > MAX_QUEUE_BYTES:
        queue.clear()
        return reject(session, spec, f"ERR the transaction is over the limit of {MAX_QUEUE_BYTES} bytes")
    queue.append((spec, args))
    return QUEUED


def _rejection(session: Session, spec: Spec) -> str | None:
    bits = spec.bits
    if not session.authenticated and not bits & NO_AUTH:
        return "NOAUTH Authentication required."
    if session.queue is not None and bits & NO_MULTI:
        return "ERR Command not allowed inside a transaction"
    if session.engine.memory.limit and _may_need_memory(session, spec) and session.engine.memory.exceeded():
        return OUT_OF_MEMORY
    if (session.channels or session.patterns) and session.protocol == 2 and not bits & WHILE_SUBSCRIBED:
        return (
            f"ERR Can't execute '{spec.display_name}': only (P|S)SUBSCRIBE / (P|S)UNSUBSCRIBE / PING / QUIT / RESET"
            " are allowed in this context"
        )
    return None


def _may_need_memory(session: Session, spec: Spec) -> bool:
    """Whether the command may need memory. Queueing does, and so does EXEC if a queued command does."""
    if session.queue is None:
        return bool(spec.bits & DENY_OOM)
    if spec.name == "EXEC":
        return any(queued.bits & DENY_OOM for queued, _ in session.queue)
    return not spec.bits & NOT_QUEUED


def _execute_without_reply(session: Session, args: Sequence[bytes]) -> Reply:
    """Runs a command after CLIENT REPLY OFF or SKIP. Only a command that enables replies again is answered."""
    engine = session.engine
    muted, session.muted, session.skip_reply = session.muted, False, False
    session.refresh()
    queued = session.queue is not None
    reply = engine.execute(session, args, engine.now_ms)
    if _enables_replies(args, queued=queued):
        return reply
    if muted:
        session.muted, session.skip_reply = True, False
        session.refresh()
    return reply if reply is BLOCKED else Several()


def _enables_replies(args: Sequence[bytes], *, queued: bool) -> bool:
    upper = [arg.upper() for arg in args]
    return upper == [b"RESET"] or (upper == [b"CLIENT", b"REPLY", b"ON"] and not queued)


def feed_monitors(session: Session, spec: Spec, args: Sequence[bytes], *, by_script: bool = False) -> None:
    """Sends the command to the sessions in MONITOR. Like Redis, omits administrative commands and passwords."""
    engine = session.engine
    if spec.bits & ADMIN or spec.name in ("AUTH", "HELLO", "MONITOR"):
        return
    quoted_args = b" ".join(b'"%b"' % _escape(arg) for arg in args)
    seconds, ms = divmod(engine.now_ms, 1000)
    caller = b"lua" if by_script else session.address or b"?:0"
    line = Status(b"%d.%06d [%d %b] %b" % (seconds, ms * 1000, session.db.index, caller, quoted_args))
    for monitor in engine.monitors:
        engine.outbox.append((monitor, line))


_NAMED_ESCAPES = {0x0A: b"\\n", 0x0D: b"\\r", 0x09: b"\\t", 0x07: b"\\a", 0x08: b"\\b", 0x22: b'\\"', 0x5C: b"\\\\"}


def _escape(arg: bytes) -> bytes:
    return b"".join(
        _NAMED_ESCAPES.get(byte) or (bytes((byte,)) if 0x20 <= byte < 0x7F else b"\\x%02x" % byte) for byte in arg
    )
