"""The state machine: sessions send commands, replies come back, and the outbox holds what others must be told.

Whoever drives it (the embedded link, the server) holds the lock, the clock and the journal:

    reply = engine.execute(session, args, now_ms)
    engine.take_units()   -> what must be in the journal before anything is answered
    engine.take_outbox()  -> replies to sessions that were blocked, and pushes to subscribers, in order

``execute`` never raises an ErrorReply: it returns it. BLOCKED means that the answer will come through the outbox. A
session of the outbox whose ``closing`` is set is to be closed after its replies have left.
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
from millstream.engine.commands.transactions import Twin, sha1_hex
from millstream.engine.config import Config
from millstream.engine.effects import Effect
from millstream.engine.expiry import ExpirySchedule
from millstream.engine.info import MemoryAccount, Stats
from millstream.engine.keyspace import EXPIRED, GENERIC, KEYEVENT, KEYSPACE, Database, ScanOrders
from millstream.engine.registry import Spec, Table, wrong_arity
from millstream.engine.session import BLOCKED, Block, Session, WaitingRoom
from millstream.wire import ErrorReply, Push, Reply, Several


def _nothing() -> Mapping[str, object]:
    return {}


@dataclass(slots=True)
class Hooks:
    rewrite_journal: Callable[[], None] | None = None
    """BGREWRITEAOF: start a rewrite. Raises ErrorReply when one is under way."""
    reload_journal: Callable[[], None] | None = None
    """DEBUG LOADAOF: write what is outstanding, empty the engine and load it from the journal."""
    configure: Callable[[str, str], None] | None = None
    """CONFIG SET of a parameter that the driver acts on (``appendfsync``, ``maxclients``), after it was checked. An
    ErrorReply refuses it."""
    sleep: Callable[[float], None] | None = None
    """DEBUG SLEEP: everything stands still for so many seconds."""
    server: Callable[[], Mapping[str, object]] = _nothing
    """Lines for INFO's section: tcp_port, process_id, run_id, uptime_in_seconds, ..."""
    clients: Callable[[], Mapping[str, object]] = _nothing
    memory: Callable[[], Mapping[str, object]] = _nothing
    persistence: Callable[[], Mapping[str, object]] = _nothing
    stats: Callable[[], Mapping[str, object]] = _nothing
    cpu: Callable[[], Mapping[str, object]] = _nothing


DATABASES: Final = 16
EXPIRIES_PER_TICK: Final = 500


class Engine:
    """Not thread-safe by itself: the driver serialises. ``now_ms`` is the time of the command being executed."""

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
        """The driver's measure of how long something takes: it only grows. Waits go by it, everything else by
        ``now_ms``, which somebody may set back."""
        self.password = password
        self.recording = recording
        """Whether changes are recorded as effects, for ``take_units``."""
        self.loading = False
        """Set while a journal is replayed: then keys do not expire by themselves, because the journal says when."""
        self.debug_enabled = debug_enabled
        self.hooks = hooks or Hooks()
        self.random = random.Random(seed)  # noqa: S311  # SPOP and RANDOMKEY draw lots, nothing secret
        self.outbox: list[tuple[Session, Reply]] = []
        self.databases: list[Database] = []
        self.expiry = ExpirySchedule(self.databases)
        self.memory = MemoryAccount(self.databases)
        self.databases += [Database(self, index) for index in range(DATABASES)]
        self.sessions: dict[int, Session] = {}
        self.table = Table()
        self.config = Config(self)
        self.pubsub = PubSub(self.outbox)
        self.stats = Stats()
        self.monitoring = Monitoring()
        self.scripts: dict[bytes, Twin] = {}
        self.loaded_scripts: set[bytes] = set()
        self.foreign_scripts: dict[bytes, bytes] = {}
        self.scan_orders = ScanOrders()
        self.monitors: set[Session] = set()
        self.guarded = False
        """Whether every command takes the long way: somebody monitors, or memory is limited."""
        self.notify_flags = 0
        self.dirty = 0
        """Counts changes since the start."""
        self.waiting = WaitingRoom()
        self._fast = self.table.fast
        self._unit: list[Effect] = []
        self._units: list[list[Effect]] = []
        self._ready: dict[tuple[int, bytes], None] = {}
        self._next_session = 1

    # --- sessions ---------------------------------------------------------------------------------------------------

    def session(self, *, address: bytes = b"", trusted: bool = False) -> Session:
        """A new client. A trusted one (the process that embeds the engine) needs no password."""
        session = Session(self, self._next_session, self.databases[0])
        self._next_session += 1
        session.address = address
        session.authenticated = trusted or self.password is None
        session.refresh()
        self.sessions[session.id] = session
        self.stats.connections += 1
        return session

    def drop(self, session: Session) -> None:
        """The client is gone: it waits for nothing, watches nothing, hears nothing. Dropping twice is harmless."""
        self.sessions.pop(session.id, None)
        self.waiting.leave(session)
        self.unwatch(session)
        self.pubsub.forget(session)
        if session in self.monitors:
            self.monitors.discard(session)
            self.refresh()

    def refresh(self) -> None:
        """To be called after a change of anything that concerns every session's way."""
        self.guarded = bool(self.monitors) or self.memory.limit > 0
        for session in self.sessions.values():
            session.refresh()

    # --- commands ---------------------------------------------------------------------------------------------------

    def execute(self, session: Session, args: Sequence[bytes], now_ms: int) -> Reply:
        """Runs one command to its end, and then everything that it made possible for blocked sessions."""
        self.now_ms = session.seen_ms = now_ms
        spec = self._fast.get(args[0])
        if spec is None:
            try:
                spec = self.table.look_up(args)
            except ErrorReply as error:
                return admission.reject(session, None, error.text)
        if not spec.least <= len(args) <= spec.most:
            return admission.reject(session, spec, wrong_arity(spec))
        if session.special and (answer := admission.answer(session, spec, args)) is not None:
            return answer
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
            self.waiting.enter(session, reply, self.elapsed_ms())
            return BLOCKED
        return reply

    def call(self, session: Session, spec: Spec, args: Sequence[bytes]) -> Reply:
        """Runs one command inside another (EXEC, a script): nothing is served, no unit ends, nobody waits."""
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

    # --- what handlers say ------------------------------------------------------------------------------------------

    def modified(self, db: Database, key: bytes) -> None:
        """The key's value was changed, added or taken away: those who watch it or wait for it will be told."""
        self.dirty += 1
        if db.attended:
            self._attend(db, key)

    def wake(self, db: Database, key: bytes) -> None:
        """Those who wait for the key look again, although its value is the same to those who watch it."""
        if key in db.blocked:
            self._ready[db.index, key] = None

    def _attend(self, db: Database, key: bytes) -> None:
        for session in db.watchers.get(key, ()):
            session.dirty = True
        if key in db.blocked:
            self._ready[db.index, key] = None
        if self.memory.limit:
            self.memory.note_change(db.index, key)

    def notify(self, db: Database, kind: int, event: bytes, key: bytes) -> None:
        """A keyspace notification, where its kind is on."""
        flags = self.notify_flags
        if not flags & kind:
            return
        if flags & KEYSPACE:
            self.pubsub.publish(b"__keyspace@%d__:%b" % (db.index, key), event)
        if flags & KEYEVENT:
            self.pubsub.publish(b"__keyevent@%d__:%b" % (db.index, event), key)

    def record(self, db: Database, *words: bytes) -> None:
        """An effect for the journal. Callers test ``recording`` first where building the words costs something."""
        if self.recording:
            self._unit.append((db.index, words))

    def changed(self, db: Database, key: bytes, kind: int, event: bytes, words: Sequence[bytes]) -> None:
        """``modified``, ``notify`` and ``record`` in one, for a command that has the same effect whenever it is
        replayed."""
        self.modified(db, key)
        if self.notify_flags & kind:
            self.notify(db, kind, event, key)
        if self.recording:
            self._unit.append((db.index, tuple(words)))

    def delete(self, db: Database, key: bytes) -> None:
        """The key goes, and everybody is told. Nothing is recorded: the caller knows by which command it went."""
        db.remove(key)
        self.notify(db, GENERIC, b"del", key)
        self.modified(db, key)

    def flush(self, db: Database) -> None:
        """Every key of the database goes. Redis tells nobody but those who watch or wait for a key that was there."""
        for key in [*db.watchers, *db.blocked]:
            if db.find(key) is not None:
                self.modified(db, key)
        self.dirty += len(db.values)
        db.values.clear()
        db.expires.clear()
        if self.memory.limit:
            self.memory.recount()

    def expire(self, db: Database, key: bytes) -> None:
        """The key's time is over: it goes, and everybody is told."""
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
        """Ends the unit of effects, and serves blocked sessions: key by key, and at each key in order of arrival."""
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
            self._send(session, reply)  # before it leaves: interrupted in between, it is still to be found
            self.waiting.leave(session)
        self._end_unit()

    def _send(self, session: Session, reply: Reply) -> None:
        self.outbox.append((session, Several() if session.muted else reply))

    def _end_unit(self) -> None:
        if self._unit:
            self._units.append(self._unit)
            self._unit = []

    def take_units(self) -> list[list[Effect]]:
        """What changed since the last call: one list per command, EXEC, script or service of a blocked session."""
        units, self._units = self._units, []
        return units

    def break_off(self) -> set[Session]:
        """A command was interrupted at some line: what it recorded does not count, and nobody waits any more. Returns
        who waited, or has an answer that did not leave."""
        unheard = {session for session, reply in self.outbox if type(reply) is not Push}
        unheard.update(session for session in self.sessions.values() if session.blocked is not None)
        self._unit, self._units, self._ready, self.waiting = [], [], {}, WaitingRoom()
        self.outbox.clear()
        for db in self.databases:
            db.blocked.clear()
            db.refresh()
        for session in unheard:
            session.blocked = None
        return unheard

    def take_outbox(self) -> list[tuple[Session, Reply]]:
        outbox = self.outbox[:]
        self.outbox.clear()
        return outbox

    # --- time -------------------------------------------------------------------------------------------------------

    def due_in_ms(self, now_ms: int) -> int | None:
        """In how long ``tick`` has something to do: a wait ends, or a key expires. None: never, as things are."""
        wait_until, expiry_at = self.waiting.next_deadline(), self.expiry.next_deadline()
        left = []
        if wait_until is not None:
            left.append(wait_until - self.elapsed_ms())
        if expiry_at is not None:
            left.append(expiry_at - now_ms)
        return max(0, min(left)) if left else None

    def tick(self, now_ms: int) -> None:
        """Ends waits whose time is over, and removes keys whose time is over: at most EXPIRIES_PER_TICK of them."""
        self.now_ms = now_ms
        for session in self.waiting.overdue(self.elapsed_ms()):
            if session.blocked is not None:
                self._send(session, session.blocked.timeout_reply)
                self.waiting.leave(session)
        if not self.loading:
            for db, key in self.expiry.due(now_ms, EXPIRIES_PER_TICK):
                self.expire(db, key)
                self._end_unit()
        if self._ready:
            self._settle()

    def cancel(self, session: Session) -> bool:
        """The session's client no longer waits. False: it did not wait, and an answer may be in the outbox."""
        return self.waiting.leave(session) is not None

    def unblock(self, session: Session, error: ErrorReply | None = None) -> bool:
        """Ends a wait as its time-out would, or with an error (CLIENT UNBLOCK)."""
        block = self.waiting.leave(session)
        if block is None:
            return False
        if error is not None and session.last is not None:
            session.last.failed += 1
        self._send(session, block.timeout_reply if error is None else error)
        return True

    # --- the rest ---------------------------------------------------------------------------------------------------

    def register_script(self, source: bytes, twin: Twin) -> bytes:
        """Makes ``twin`` the meaning of the script ``source``. Returns the SHA1 by which EVALSHA calls it."""
        sha = sha1_hex(source)
        self.scripts[sha] = twin
        self.loaded_scripts.add(sha)
        return sha

    def know_scripts(self, twins: Mapping[bytes, Twin]) -> None:
        """Scripts by their SHA1, whose text nobody here has: a client that loads one brings it."""
        self.scripts.update(twins)

    def used_memory(self) -> int:
        """An estimate of what keys and values take, in bytes."""
        return self.memory.used()
