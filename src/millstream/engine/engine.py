"""The state machine: executes the commands of sessions, and collects replies for other sessions in an outbox.

The driver (the embedded transport or the server) owns the lock, the clock and the journal:

    reply = engine.execute(session, args, now_ms)
    engine.take_units()   -> the changes; they must be in the journal before any reply is sent
    engine.take_outbox()  -> replies to sessions that were blocked, and pushes to subscribers, in order

``execute`` returns an ErrorReply and never raises it. BLOCKED means that the reply will be in the outbox later. The
driver closes a session whose ``closing`` is set after it has sent the session's replies.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import millstream.engine.commands  # noqa: F401  # importing the handlers registers them
from millstream.engine import admission
from millstream.engine.commands.monitoring import Monitoring
from millstream.engine.commands.pubsub import PubSub
from millstream.engine.commands.transactions import Emulation, sha1_hex
from millstream.engine.config import Config
from millstream.engine.effects import Effect
from millstream.engine.expiry import ExpirySchedule
from millstream.engine.info import MemoryAccount, Stats
from millstream.engine.keyspace import EXPIRED, GENERIC, KEYEVENT, KEYSPACE, Database, ScanOrders
from millstream.engine.registry import Spec, Table, wrong_arity
from millstream.engine.session import BLOCKED, Block, BlockedSessions, Session
from millstream.wire import ErrorReply, Push, Reply, Several


def _no_lines() -> Mapping[str, object]:
    return {}


@dataclass(slots=True)
class Hooks:
    """Functions of the driver for commands that act on the process: journal, configuration, statistics."""

    rewrite_journal: Callable[[], None] | None = None
    """BGREWRITEAOF: starts a rewrite. Raises ErrorReply if one is in progress."""
    reload_journal: Callable[[], None] | None = None
    """DEBUG LOADAOF: writes the outstanding changes, empties the engine and loads it from the journal."""
    configure: Callable[[str, str], None] | None = None
    """CONFIG SET, after the value was checked, for parameters of the driver (``appendfsync``, ``maxclients``). Raises
    ErrorReply to reject the value."""
    sleep: Callable[[float], None] | None = None
    """DEBUG SLEEP: blocks the whole server for this many seconds."""
    server: Callable[[], Mapping[str, object]] = _no_lines
    """Lines of the INFO section of the same name: tcp_port, process_id, run_id, uptime_in_seconds, ..."""
    clients: Callable[[], Mapping[str, object]] = _no_lines
    memory: Callable[[], Mapping[str, object]] = _no_lines
    persistence: Callable[[], Mapping[str, object]] = _no_lines
    stats: Callable[[], Mapping[str, object]] = _no_lines
    cpu: Callable[[], Mapping[str, object]] = _no_lines


DATABASE_COUNT: Final = 16
MAX_EXPIRIES_PER_TICK: Final = 500


class Engine:
    """The state machine. Not thread-safe: the driver serialises calls. ``now_ms`` is the time of the last command."""

    def __init__(
        self,
        *,
        password: bytes | None = None,
        recording: bool = False,
        debug_enabled: bool = False,
        hooks: Hooks | None = None,
        seed: int | None = None,
        now_ms: int = 0,
        elapsed_ms: Callable[[], int] | None = None,
    ) -> None:
        self.now_ms = self.started_ms = now_ms
        self.elapsed_ms: Callable[[], int] = elapsed_ms or (lambda: self.now_ms)
        """A monotonic clock. Timeouts of blocked sessions use it, because ``now_ms`` is the wall clock, which can be
        set back."""
        self.password = password
        self.recording = recording
        """Whether changes are recorded as effects, for ``take_units``."""
        self.loading = False
        """Whether a journal is being replayed. Then keys do not expire by time, because the journal contains their
        deletion."""
        self.debug_enabled = debug_enabled
        self.hooks = hooks or Hooks()
        self.random = random.Random(seed)  # noqa: S311  # for SPOP and RANDOMKEY, not for secrets
        self.outbox: list[tuple[Session, Reply]] = []
        self.databases: list[Database] = []
        self.expiry = ExpirySchedule(self.databases)
        self.memory = MemoryAccount(self.databases)
        self.databases += [Database(self, index) for index in range(DATABASE_COUNT)]
        self.sessions: dict[int, Session] = {}
        self.table = Table()
        self.config = Config(self)
        self.pubsub = PubSub(self.outbox)
        self.stats = Stats()
        self.monitoring = Monitoring()
        self.scripts: dict[bytes, Emulation] = {}
        self.loaded_scripts: set[bytes] = set()
        self.foreign_scripts: dict[bytes, bytes] = {}
        self.scan_orders = ScanOrders()
        self.monitors: set[Session] = set()
        self.checks_every_command = False
        """Whether all sessions take the path with checks: a session is in MONITOR, or memory is limited."""
        self.notify_flags = 0
        self.dirty = 0
        """The number of changes since the start."""
        self.waiting = BlockedSessions()
        self._fast = self.table.fast
        self._unit: list[Effect] = []
        self._units: list[list[Effect]] = []
        self._ready: dict[tuple[int, bytes], None] = {}
        self._next_session = 1

    # --- sessions ---------------------------------------------------------------------------------------------------

    def session(self, *, address: bytes = b"", trusted: bool = False) -> Session:
        """Opens a session for a client. A trusted client (the process that embeds the engine) needs no password."""
        session = Session(self, self._next_session, self.databases[0])
        self._next_session += 1
        session.address = address
        session.authenticated = trusted or self.password is None
        session.refresh()
        self.sessions[session.id] = session
        self.stats.connections += 1
        return session

    def drop(self, session: Session) -> None:
        """Ends the session of a client: its wait, its watches and its subscriptions. May be called twice."""
        self.sessions.pop(session.id, None)
        self.waiting.remove(session)
        self.unwatch(session)
        self.pubsub.unsubscribe_all(session)
        if session in self.monitors:
            self.monitors.discard(session)
            self.refresh()

    def refresh(self) -> None:
        """Updates ``special`` of all sessions. To be called when MONITOR or the memory limit starts or ends."""
        self.checks_every_command = bool(self.monitors) or self.memory.limit > 0
        for session in self.sessions.values():
            session.refresh()

    # --- commands ---------------------------------------------------------------------------------------------------

    def execute(self, session: Session, args: Sequence[bytes], now_ms: int) -> Reply:
        """Runs one command, and then serves the blocked sessions that wait for a key that it changed."""
        self.now_ms = session.seen_ms = now_ms
        spec = self._fast.get(args[0])
        if spec is None:
            try:
                spec = self.table.look_up(args)
            except ErrorReply as error:
                return admission.reject(session, None, error.text)
        if not spec.min_args <= len(args) <= spec.max_args:
            return admission.reject(session, spec, wrong_arity(spec))
        if session.special and (early_reply := admission.admit(session, spec, args)) is not None:
            return early_reply
        spec.calls += 1
        session.last = spec
        try:
            reply = spec.handler(session, args)
        except ErrorReply as error:
            spec.failed += 1
            self.stats.count_error(error.text)
            reply = error
        if self._unit or self._ready:
            self._settle()
        if type(reply) is Block:
            self.waiting.add(session, reply, self.elapsed_ms())
            return BLOCKED
        return reply

    def call(self, session: Session, spec: Spec, args: Sequence[bytes]) -> Reply:
        """Runs one command inside another (EXEC, a script). Serves no blocked session, ends no unit, never blocks."""
        spec.calls += 1
        may_block, session.may_block = session.may_block, False
        try:
            reply = spec.handler(session, args)
        except ErrorReply as error:
            spec.failed += 1
            self.stats.count_error(error.text)
            return error
        finally:
            session.may_block = may_block
        return reply.timeout_reply if type(reply) is Block else reply

    # --- called by handlers -----------------------------------------------------------------------------------------

    def modified(self, db: Database, key: bytes) -> None:
        """Marks a key as changed, added or removed, for sessions that watch it or are blocked on it."""
        self.dirty += 1
        if db.observed:
            self._notify_change(db, key)

    def wake(self, db: Database, key: bytes) -> None:
        """Serves the sessions that are blocked on the key, without a change for those that watch it."""
        if key in db.blocked:
            self._ready[db.index, key] = None

    def _notify_change(self, db: Database, key: bytes) -> None:
        for session in db.watchers.get(key, ()):
            session.dirty = True
        if key in db.blocked:
            self._ready[db.index, key] = None
        if self.memory.limit:
            self.memory.note_change(db.index, key)

    def notify(self, db: Database, kind: int, event: bytes, key: bytes) -> None:
        """Publishes a keyspace notification if its class is enabled."""
        flags = self.notify_flags
        if not flags & kind:
            return
        if flags & KEYSPACE:
            self.pubsub.publish(b"__keyspace@%d__:%b" % (db.index, key), event)
        if flags & KEYEVENT:
            self.pubsub.publish(b"__keyevent@%d__:%b" % (db.index, event), key)

    def record(self, db: Database, *args: bytes) -> None:
        """Records an effect for the journal. Callers test ``recording`` first if the arguments are expensive."""
        if self.recording:
            self._unit.append((db.index, args))

    def changed(self, db: Database, key: bytes, kind: int, event: bytes, args: Sequence[bytes]) -> None:
        """``modified``, ``notify`` and ``record``, for a command that has the same effect whenever it is replayed."""
        self.modified(db, key)
        if self.notify_flags & kind:
            self.notify(db, kind, event, key)
        if self.recording:
            self._unit.append((db.index, tuple(args)))

    def delete(self, db: Database, key: bytes) -> None:
        """Deletes a key, with its notifications. Records no effect: the caller records its own command."""
        db.remove(key)
        self.notify(db, GENERIC, b"del", key)
        self.modified(db, key)

    def flush(self, db: Database) -> None:
        """Deletes all keys of a database. Like Redis, notifies only sessions that watch or wait for an existing key."""
        for key in [*db.watchers, *db.blocked]:
            if db.find(key) is not None:
                self.modified(db, key)
        self.dirty += len(db.values)
        db.values.clear()
        db.expires.clear()
        if self.memory.limit:
            self.memory.recount()

    def expire(self, db: Database, key: bytes) -> None:
        """Deletes an expired key, with its effect and notifications."""
        db.remove(key)
        self.stats.expired_keys += 1
        self.record(db, b"DEL", key)
        self.notify(db, EXPIRED, b"expired", key)
        self.modified(db, key)

    def unwatch(self, session: Session) -> None:
        for index, key in session.watched:
            db = self.databases[index]
            watchers = db.watchers.get(key)
            if watchers is not None:
                watchers.discard(session)
                if not watchers:
                    del db.watchers[key]
                    db.refresh()
        session.watched.clear()
        session.dirty = False

    # --- after a command --------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Ends the unit of effects, and serves blocked sessions: key by key, for each key in order of arrival."""
        self._end_unit()
        while self._ready:
            ready, self._ready = self._ready, {}
            for index, key in ready:
                for session in list(self.databases[index].blocked.get(key, ())):
                    self._serve(session, key)

    def _serve(self, session: Session, key: bytes) -> None:
        block = session.blocked
        if block is None:
            return
        try:
            reply = block.serve(key)
        except ErrorReply as error:
            self.stats.count_error(error.text)
            reply = error
            if session.last is not None:
                session.last.failed += 1
        if reply is not None:
            self._send(session, reply)  # before the removal: an interruption in between must not lose the session
            self.waiting.remove(session)
        self._end_unit()

    def _send(self, session: Session, reply: Reply) -> None:
        self.outbox.append((session, Several() if session.muted else reply))

    def _end_unit(self) -> None:
        if self._unit:
            self._units.append(self._unit)
            self._unit = []

    def take_units(self) -> list[list[Effect]]:
        """Returns the effects since the last call: one list per command, EXEC, script or served session."""
        units, self._units = self._units, []
        return units

    def discard_interrupted(self) -> set[Session]:
        """Cleans up after a command was interrupted by an exception: drops its effects, and unblocks all sessions.

        Returns the sessions that were blocked or whose reply was still in the outbox.
        """
        unanswered = {session for session, reply in self.outbox if type(reply) is not Push}
        unanswered.update(session for session in self.sessions.values() if session.blocked is not None)
        self._unit, self._units, self._ready, self.waiting = [], [], {}, BlockedSessions()
        self.outbox.clear()
        for db in self.databases:
            db.blocked.clear()
            db.refresh()
        for session in unanswered:
            session.blocked = None
        return unanswered

    def take_outbox(self) -> list[tuple[Session, Reply]]:
        outbox = self.outbox[:]
        self.outbox.clear()
        return outbox

    # --- time -------------------------------------------------------------------------------------------------------

    def due_in_ms(self, now_ms: int) -> int | None:
        """The time until ``tick`` has to run: a blocked session times out, or a key expires. None: neither will."""
        wait_until, expiry_at = self.waiting.next_deadline(), self.expiry.next_deadline()
        waits_ms = []
        if wait_until is not None:
            waits_ms.append(wait_until - self.elapsed_ms())
        if expiry_at is not None:
            waits_ms.append(expiry_at - now_ms)
        return max(0, min(waits_ms)) if waits_ms else None

    def tick(self, now_ms: int) -> None:
        """Ends waits that timed out, and deletes expired keys: at most MAX_EXPIRIES_PER_TICK."""
        self.now_ms = now_ms
        for session in self.waiting.overdue(self.elapsed_ms()):
            if session.blocked is not None:
                self._send(session, session.blocked.timeout_reply)
                self.waiting.remove(session)
        if not self.loading:
            for db, key in self.expiry.due(now_ms, MAX_EXPIRIES_PER_TICK):
                self.expire(db, key)
                self._end_unit()
        if self._ready:
            self._settle()

    def cancel(self, session: Session) -> bool:
        """Unblocks the session without a reply. False: it was not blocked, and a reply may be in the outbox."""
        return self.waiting.remove(session) is not None

    def unblock(self, session: Session, error: ErrorReply | None = None) -> bool:
        """Unblocks the session with the reply of a timeout, or with an error (CLIENT UNBLOCK)."""
        block = self.waiting.remove(session)
        if block is None:
            return False
        if error is not None and session.last is not None:
            session.last.failed += 1
        self._send(session, block.timeout_reply if error is None else error)
        return True

    # --- scripts and memory -----------------------------------------------------------------------------------------

    def register_script(self, source: bytes, emulation: Emulation) -> bytes:
        """Runs ``emulation`` for the Lua script ``source``. Returns the SHA1 by which EVALSHA calls it."""
        sha = sha1_hex(source)
        self.scripts[sha] = emulation
        self.loaded_scripts.add(sha)
        return sha

    def used_memory(self) -> int:
        """An estimate of the memory of keys and values, in bytes."""
        return self.memory.used()
