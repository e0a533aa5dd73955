"""The long way into a command: what stands between a special session's words and the handler, in Redis's order.

Nothing here changes data. A refusal marks an open transaction as failed.
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
AT_ONCE = int(Flag.AT_ONCE)
ADMIN = int(Flag.ADMIN)

QUEUE_BYTES: Final = 256 << 20
"""What the commands between MULTI and EXEC may take in memory, about."""
COMMAND_BYTES: Final = 400

OUT_OF_MEMORY = "OOM command not allowed when used memory > 'maxmemory'."


def reject(session: Session, spec: Spec | None, text: str) -> Reply:
    """The command is refused before it runs."""
    engine = session.engine
    if session.queue is not None:
        session.queue_failed = True
        if spec is not None and spec.name == "EXEC":
            text = f"EXECABORT Transaction discarded because of: {text.removeprefix('ERR ')}"
            discard(session)
    if spec is not None:
        spec.rejected += 1
    engine.stats.count_error(text)
    if session.muted or session.skips:
        session.skips = False
        session.refresh()
        return Several()
    return ErrorReply(text)


def discard(session: Session) -> None:
    """The open transaction is over; nothing is watched any more."""
    session.queue = None
    session.queue_failed = False
    session.queue_bytes = 0
    session.engine.unwatch(session)
    session.refresh()


def answer(session: Session, spec: Spec, args: Sequence[bytes]) -> Reply | None:
    """The answer of a command that does not run now: refused, queued, or wanted without an answer. None: it runs."""
    if session.muted or session.skips:
        return _without_answer(session, args)
    refusal = _refusal(session, spec)
    if refusal is not None:
        return reject(session, spec, refusal)
    if session.queue is not None and not spec.bits & AT_ONCE:
        return _queue(session, session.queue, spec, args)
    if session.engine.monitors and spec.name != "EXEC":
        feed_monitors(session, spec, args)
    return None


def _queue(session: Session, queue: list[tuple[Spec, Sequence[bytes]]], spec: Spec, args: Sequence[bytes]) -> Reply:
    if session.queue_failed:
        return QUEUED  # it will never run, so that keeping it would only take memory
    session.queue_bytes += COMMAND_BYTES + sum(map(len, args))
    if session.queue_bytes > QUEUE_BYTES:
        queue.clear()
        return reject(session, spec, f"ERR the transaction is over the limit of {QUEUE_BYTES} bytes")
    queue.append((spec, args))
    return QUEUED


def _refusal(session: Session, spec: Spec) -> str | None:
    bits = spec.bits
    if not session.authenticated and not bits & NO_AUTH:
        return "NOAUTH Authentication required."
    if session.queue is not None and bits & NO_MULTI:
        return "ERR Command not allowed inside a transaction"
    if session.engine.memory.limit and _would_add(session, spec) and session.engine.memory.exceeded():
        return OUT_OF_MEMORY
    if (session.channels or session.patterns) and session.protocol == 2 and not bits & WHILE_SUBSCRIBED:
        return (
            f"ERR Can't execute '{spec.spoken}': only (P|S)SUBSCRIBE / (P|S)UNSUBSCRIBE / PING / QUIT / RESET"
            " are allowed in this context"
        )
    return None


def _would_add(session: Session, spec: Spec) -> bool:
    """Whether the command may need memory: queueing does, and so does EXEC of something that does."""
    if session.queue is None:
        return bool(spec.bits & DENY_OOM)
    if spec.name == "EXEC":
        return any(queued.bits & DENY_OOM for queued, _ in session.queue)
    return not spec.bits & AT_ONCE


def _without_answer(session: Session, args: Sequence[bytes]) -> Reply:
    """Runs the command for a session that wants no answer, unless the command makes it want answers again."""
    engine = session.engine
    muted, session.muted, session.skips = session.muted, False, False
    session.refresh()
    queued = session.queue is not None
    reply = engine.execute(session, args, engine.now_ms)
    if _wants_answers(args, queued=queued):
        return reply
    if muted:
        session.muted, session.skips = True, False
        session.refresh()
    return reply if reply is BLOCKED else Several()


def _wants_answers(args: Sequence[bytes], *, queued: bool) -> bool:
    words = [word.upper() for word in args]
    return words == [b"RESET"] or (words == [b"CLIENT", b"REPLY", b"ON"] and not queued)


def feed_monitors(session: Session, spec: Spec, args: Sequence[bytes], *, by_script: bool = False) -> None:
    """Redis hides administrative commands and secrets from MONITOR."""
    engine = session.engine
    if spec.bits & ADMIN or spec.name in ("AUTH", "HELLO", "MONITOR"):
        return
    words = b" ".join(b'"%b"' % _escaped(word) for word in args)
    seconds, ms = divmod(engine.now_ms, 1000)
    caller = b"lua" if by_script else session.address or b"?:0"
    line = Status(b"%d.%06d [%d %b] %b" % (seconds, ms * 1000, session.db.index, caller, words))
    for monitor in engine.monitors:
        engine.outbox.append((monitor, line))


_NAMED = {0x0A: b"\\n", 0x0D: b"\\r", 0x09: b"\\t", 0x07: b"\\a", 0x08: b"\\b", 0x22: b'\\"', 0x5C: b"\\\\"}


def _escaped(word: bytes) -> bytes:
    return b"".join(_NAMED.get(byte) or (bytes((byte,)) if 0x20 <= byte < 0x7F else b"\\x%02x" % byte) for byte in word)
