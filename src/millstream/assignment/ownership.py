"""What a member owns, and how it keeps it: heartbeats, renewals, the Go client's locks, giving back.

The owner record beside a data stream decides who owns it. Each step runs to its end; no loop, no clock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from millstream.assignment.announcement import Announcement, balancer_group, balancer_stream, lock_key
from millstream.assignment.leases import (
    Lease,
    Token,
    View,
    lock_that_counts,
)
from millstream.assignment.membership import Member as Row
from millstream.assignment.membership import Settings, living
from millstream.assignment.notifications import (
    Notification,
    StreamAdded,
    StreamDisowned,
)
from millstream.broker import Broker, entries_at
from millstream.broker import leases as lease_steps
from millstream.errors import ConsumerHasPending, InvalidArgument, MillstreamError, NoSuchGroup, NoSuchStream
from millstream.model import EntryId, Observer, quiet
from millstream.wire import to_bytes

log = logging.getLogger(__name__)

BeforeRelease = Callable[[Sequence[str]], Awaitable[None]]
"""Told of streams before they are given back: time to finish what is in flight, at most half a lease."""


async def release_at_once(streams: Sequence[str]) -> None:
    """Nobody has to be asked."""


Answer = bytes | MillstreamError | None
"""What a key holds, or why its server did not tell."""
NOBODY = "millstream:unowned"
"""The consumer under which released entries wait, so that a sweep finds them without looking at everybody's."""
STEP = 500
"""How many streams travel together while they are taken: small enough that renewals get their turn in between."""
REPAIR_EVERY = 3
"""Renewals between two repairs of the pending list; a Go member that starts claims what was idle for 40 s."""


class Ownership:
    """The streams of one member of a service, by name, each with its lease."""

    def __init__(
        self,
        broker: Broker,
        service: str,
        name: str,
        settings: Settings,
        emit: Callable[[Notification], None],
        observer: Observer = quiet,
    ) -> None:
        if not service:
            raise InvalidArgument("service", service, "a name that is not empty")
        if not name:
            raise InvalidArgument("member", name, "a name that is not empty")
        self.broker = broker
        self.name = name
        self._word = to_bytes(name)
        self.settings = settings
        self.stream = balancer_stream(service)
        self.group = balancer_group(service)
        self.owned: dict[str, Lease] = {}
        self.view = View(0, 0, {})
        self.run = 0
        """Grows whenever a heartbeat came too late to be sure that nobody saw this member dead in between."""
        self._alive_until = 0.0
        self._emit = emit
        self._tell = partial(observer, service=service, member=name)
        self.before_release: BeforeRelease = release_at_once
        self._renewals = 0
        self._look_at_consumers_at = 0.0

    # --- being a member ---

    async def join(self) -> None:
        """From the start of the stream: what was announced before the first member came is handed out too."""
        await self.broker.create_group(self.stream, self.group, start="0")

    async def heartbeat(self) -> None:
        """Says that this member is alive, and learns who else is."""
        asked_at = time.monotonic()
        self.view = await self._send_heartbeat(self.settings.lease_ms)
        # Judged by when the answer came: a heartbeat that was sent in time may have waited on its way past the lease.
        if time.monotonic() > self._alive_until:
            self.run += 1
        self._alive_until = max(self._alive_until, asked_at + self.settings.lease_ms / 1000)

    def certain_until(self, token: Token) -> float:
        """Until then (monotonic seconds) nobody else can have taken the stream; 0 where it is not certain now."""
        lease = self.owned.get(token.stream)
        if lease is None or lease.token != token or lease.run != self.run:
            return 0.0
        return self._alive_until

    async def _send_heartbeat(self, lease_ms: int) -> View:
        now_ms, announced, rows = await self.broker.run(
            lease_steps.heartbeat,
            self.stream,
            self.name,
            lease_ms=lease_ms,
            owned=len(self.owned),
            capacity=self.settings.capacity,
        )
        return View(now_ms, announced, {name: Row.parse(row) for name, row in rows.items()})

    async def leave(self) -> None:
        """Hands every stream back at once; nothing has to time out."""
        for start in range(0, len(leases := list(self.owned.values())), STEP):
            await self._give_back(leases[start : start + STEP])
        await self._send_heartbeat(0)
        await self._delete_consumer(self.name)

    async def forget_consumers(self) -> None:
        """Removes consumers that are dead and hold nothing: every restart under a new name leaves one behind.

        Only what is empty goes, checked in the same atomic step; a consumer that was deleted in error (a Go member's,
        of which the table does not know) is made again by its next read.
        """
        if time.monotonic() < self._look_at_consumers_at:
            return
        self._look_at_consumers_at = time.monotonic() + 4 * self.settings.lease_ms / 1000
        alive = living(self.view.members, self.view.now_ms)
        consumers = await self.broker.consumer_info(self.stream, self.group)
        dead = [
            one.name
            for one in consumers
            if not one.pending
            and one.idle_ms > 2 * self.settings.lease_ms
            and one.name not in alive
            and one.name != NOBODY
        ]
        for name in dead[:STEP]:
            await self._delete_consumer(name)

    async def _delete_consumer(self, name: str) -> None:
        try:
            await self.broker.delete_consumer(self.stream, self.group, name)
        except (ConsumerHasPending, NoSuchGroup, NoSuchStream):
            pass  # what it holds is taken over first, by whoever lives

    # --- keeping what one owns ---

    async def renew(self) -> None:
        """Renews every lease in one round trip a node, and disowns what is another's by now."""
        leases = list(self.owned.values())
        if not leases:
            return
        began = time.perf_counter()
        records, values = await self.broker.run(
            lease_steps.renew_leases,
            [lease.guard.key for lease in leases],
            [key for lease in leases for key in lease.locks],
            lock_ttl_ms=self.settings.lease_ms,
        )
        locks = self._locks_that_count([lease.locks for lease in leases], values)
        vanished: list[Lease] = []
        unlocked: list[Lease] = []
        doubtful: list[Lease] = []
        for lease, record, lock in zip(leases, records, locks, strict=True):
            if self.owned.get(lease.stream) is not lease:
                continue  # finished or released while the answer was on its way
            if isinstance(record, MillstreamError) or isinstance(lock, MillstreamError):
                self._unanswered(lease.stream, record if isinstance(record, MillstreamError) else lock)
                continue  # nobody takes it while this member heartbeats: ask again in the next round
            if record != lease.guard.record:
                self._disown(lease)
                if record is None:
                    vanished.append(lease)
            elif lease.run != self.run:
                doubtful.append(lease)
            elif self.settings.go_locks and lock is None:
                unlocked.append(lease)
            elif self.settings.go_locks and lock != self._word:
                await self.broker.run(lease_steps.release_lease, lease.stream, lease.guard.record)
                self._disown(lease)
        if unlocked:
            await self._lock(unlocked)
        if vanished:
            await self._announce_again(vanished)
        if doubtful:
            await self._take_again(doubtful)
        self._renewals += 1
        if self._renewals % REPAIR_EVERY == 0:
            await self._keep_announced()
        self._tell("assignment.renewed", leases=len(leases), seconds=time.perf_counter() - began)

    def _unanswered(self, stream: str, error: object) -> None:
        """One stream's server refused, while the others answered: said, and left for the next round."""
        log.warning("stream %r gave no answer: %s", stream, error)
        self._tell("assignment.unanswered", stream=stream, error=str(error))

    def _disown(self, lease: Lease) -> None:
        del self.owned[lease.stream]
        self._emit(StreamDisowned(lease.stream, lease.lbs_id, lease.info, lease.token))
        self._tell("assignment.disowned", stream=lease.stream)

    async def _take_again(self, leases: Sequence[Lease]) -> None:
        """This member was silent for longer than its lease, and the records are still its own. A rival who saw it dead
        may be about to take them: so they are taken anew, by the same step that lets one of two rivals win."""
        run = self.run  # before the answer, as heartbeats go on meanwhile
        numbers = await self.broker.run(
            lease_steps.take_leases, self.name, [(one.stream, one.guard.record) for one in leases]
        )
        for lease, number in zip(leases, numbers, strict=True):
            if self.owned.get(lease.stream) is not lease:
                continue
            if isinstance(number, MillstreamError):
                self._unanswered(lease.stream, number)
                continue  # doubtful still: the next renewal tries again
            self._disown(lease)
            if number is not None:
                token = Token(lease.stream, self.name, number)
                self.owned[lease.stream] = Lease(token, lease.lbs_id, lease.info, run, lease.locks)
                self._emit(StreamAdded(lease.stream, lease.lbs_id, lease.info, token, self.name))
                self._tell("assignment.taken", stream=lease.stream, taken_from=self.name)

    async def _keep_announced(self) -> None:
        """Keeps the pending list in step with the records: these entries are this member's, not idle, and there."""
        leases = list(self.owned.values())
        try:
            held = await self._hold([lease.lbs_id for lease in leases])
        except NoSuchGroup:
            await self._make_group_again()
            held = set()
        await self._announce_again([lease for lease in leases if lease.lbs_id not in held])

    async def _hold(self, ids: Sequence[EntryId]) -> set[EntryId]:
        """Claims entries of the load-balancer stream for this member; those that are there."""
        held: set[EntryId] = set()
        for start in range(0, len(ids), STEP):
            chunk = ids[start : start + STEP]
            held.update(await self.broker.xclaim_ids(self.stream, self.group, self.name, chunk, min_idle_ms=0))
        return held

    async def _announce_again(self, leases: Sequence[Lease]) -> None:
        """The server lost data (FLUSHALL, a failover): whoever owned a stream is the one who still knows of it."""
        if not leases:
            return
        entries = await self.broker.run(entries_at, self.stream, [lease.lbs_id for lease in leases])
        gone = [lease for lease, entry in zip(leases, entries, strict=True) if entry is None]
        if not gone:
            return
        log.warning("the announcements of %d streams have vanished from the server; announcing them again", len(gone))
        ids = await self.broker.xadd_many(self.stream, [Announcement(one.stream, one.info).fields() for one in gone])
        for lease, lbs_id in zip(gone, ids, strict=True):
            lease.lbs_id, lease.locks = lbs_id, self._lock_keys(lease.stream, lbs_id)

    async def _make_group_again(self) -> None:
        log.warning("the group %r of %r has vanished; making it again", self.group, self.stream)
        await self.join()

    def _lock_keys(self, stream: str, lbs_id: EntryId) -> list[bytes]:
        """Under which names Go members look for the lock of a stream: one for each kind of release in the fleet."""
        if not self.settings.go_locks:
            return []
        return [lock_key(stream, lbs_id, separator) for separator in self.settings.go_lock_separators]

    async def _lock(self, leases: Sequence[Lease]) -> list[str]:
        """Takes the Go client's locks; gives back, and names, the streams that a Go member holds."""
        flat = [key for lease in leases for key in lease.locks]
        granted = iter(await self.broker.run(lease_steps.lock_keys, flat, self.name, ttl_ms=self.settings.lease_ms))
        refused: list[Lease] = []
        for lease in leases:
            answers = [next(granted) for _ in lease.locks]
            trouble = next((one for one in answers if isinstance(one, MillstreamError)), None)
            if trouble is not None:
                self._unanswered(lease.stream, trouble)
                if self.owned.get(lease.stream) is lease:
                    continue  # the next renewal asks again
            if not all(one is True for one in answers):
                refused.append(lease)
        await self._unlock(refused)
        released = await self.broker.run(
            lease_steps.release_leases, [(lease.stream, lease.guard.record) for lease in refused]
        )
        for lease, gone in zip(refused, released, strict=True):
            if isinstance(gone, MillstreamError):
                self._unanswered(lease.stream, gone)
            if self.owned.get(lease.stream) is lease:
                self._disown(lease)
        return [lease.stream for lease in refused]

    async def _unlock(self, leases: Sequence[Lease]) -> None:
        keys = [key for lease in leases for key in lease.locks]
        if keys:
            await self.broker.run(lease_steps.unlock_keys, keys, self.name)

    async def _give_back(self, leases: Sequence[Lease]) -> None:
        await self.before_release([lease.stream for lease in leases])
        for lease in leases:
            self.owned.pop(lease.stream, None)
        # The records first: they decide. Then the entries go to nobody, where the others' sweeps find them.
        released = await self.broker.run(
            lease_steps.release_leases, [(lease.stream, lease.guard.record) for lease in leases]
        )
        await self._unlock(leases)
        mine = [lease for lease, ok in zip(leases, released, strict=True) if ok is True]
        self._tell("assignment.released", streams=[lease.stream for lease in leases])
        parked = await self._park([lease.lbs_id for lease in mine])
        # What the server does not know of any more was known to its owner alone: say it once more. A record that is
        # another's, or was released, means the opposite: the stream went its way while this member slept.
        for lease, ok in zip(leases, released, strict=True):
            if isinstance(ok, MillstreamError):
                self._unanswered(lease.stream, ok)
        others = [lease for lease, ok in zip(leases, released, strict=True) if ok is not True]
        records, _ = await self._read([lease.stream for lease in others], [lease.lbs_id for lease in others])
        unknown = [lease for lease in mine if lease.lbs_id not in parked]
        unknown += [lease for lease, record in zip(others, records, strict=True) if record is None]
        await self._announce_again(unknown)

    async def _read(self, streams: Sequence[str], ids: Sequence[EntryId]) -> tuple[list[Answer], list[Answer]]:
        """Owner records, and of each stream's locks the one that counts."""
        keys = [self._lock_keys(stream, lbs_id) for stream, lbs_id in zip(streams, ids, strict=True)]
        records, values = await self.broker.run(
            lease_steps.read_leases, streams, [key for each in keys for key in each]
        )
        return records, self._locks_that_count(keys, values)

    def _locks_that_count(self, keys: Sequence[Sequence[bytes]], values: list[Answer]) -> list[Answer]:
        """Of each stream's locks: somebody else's, or none, or this member's."""
        if len(self.settings.go_lock_separators) == 1 and self.settings.go_locks:
            return values  # each stream has one
        answers = iter(values)
        return [lock_that_counts([next(answers) for _ in each], self.name) for each in keys]

    async def _read_one(self, stream: str, lbs_id: EntryId) -> tuple[bytes | None, bytes | None]:
        [record], [lock] = await self._read([stream], [lbs_id])
        if isinstance(record, MillstreamError):
            raise record
        if isinstance(lock, MillstreamError):
            raise lock
        return record, lock

    async def _park(self, ids: Sequence[EntryId]) -> set[EntryId]:
        if not ids:
            return set()
        return set(await self.broker.xclaim_ids(self.stream, self.group, NOBODY, ids, min_idle_ms=0))
