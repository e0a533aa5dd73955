"""The streams that a member owns: heartbeats, renewals, the locks of the Go client, releases.

The owner record of a data stream decides who owns it. A step runs to its end; the loops are in ``client``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from millstream.assignment.announcement import (
    Announcement,
    add_announcements,
    balancer_group,
    balancer_stream,
    lock_key,
)
from millstream.assignment.errors import MalformedOwnerRecord
from millstream.assignment.leases import (
    FencingToken,
    Lease,
    OwnerRecord,
    View,
    effective_lock,
)
from millstream.assignment.membership import Settings, living, parse_members
from millstream.assignment.notifications import (
    Notification,
    StreamAdded,
    StreamDisowned,
)
from millstream.broker import BlockingBroker, Broker
from millstream.broker.operations.streams import entries_at
from millstream.broker.scripts import leases as lease_scripts
from millstream.errors import ConsumerHasPending, InvalidArgument, MillstreamError, NoSuchGroup, NoSuchStream
from millstream.model import EntryId, Observer, quiet, suspend_aware_s
from millstream.wire import to_bytes

log = logging.getLogger(__name__)

BeforeRelease = Callable[[Sequence[str]], Awaitable[None]]
"""Called with streams before they are released: time to finish messages in flight, at most half a lease."""


async def release_at_once(streams: Sequence[str]) -> None:
    """Does nothing."""


ChooseReleases = Callable[[Sequence[str], int], Sequence[str]]
"""Called with all streams of this member, and how many of them exceed its share. Returns those to release now. It may
return fewer, because streams are still in use, and streams that it found unused after an earlier call."""


def release_last_taken(streams: Sequence[str], excess: int) -> Sequence[str]:
    """The streams that were taken last."""
    return streams[len(streams) - excess :]


Answer = bytes | MillstreamError | None
"""The value of a key, or the error that its server returned."""
UNOWNED = "millstream:unowned"
"""The consumer for which released announcements are pending, so that a scan need not examine other consumers."""
DUPLICATES = "millstream:duplicates"
"""The consumer for which further announcements of owned streams are pending. Shares do not count them. When the owner
finishes the stream, its next announcement returns to UNOWNED, so that the stream gets a new owner."""
MAX_STREAMS_PER_STEP = 500
"""Streams that one step takes or releases at most, so that renewals can run between the steps."""
REPAIR_EVERY = 3
"""Renewals between two repairs of the pending list. A Go member that starts claims entries that were idle for 40 s."""


class Ownership:
    """The streams of one member of a service, by name, each with its lease."""

    def __init__(
        self,
        broker: Broker,
        service: str,
        name: str,
        settings: Settings,
        notify: Callable[[Notification], None],
        observer: Observer = quiet,
    ) -> None:
        if not service:
            raise InvalidArgument("service", service, "a name that is not empty")
        if not name:
            raise InvalidArgument("member", name, "a name that is not empty")
        self.broker = broker
        self.name = name
        self._name_bytes = to_bytes(name)
        self.settings = settings
        self.stream = balancer_stream(service)
        self.group = balancer_group(service)
        self.owned: dict[str, Lease] = {}
        self.view = View(0, 0, {})
        self.run = 0
        """The number of the current run of heartbeats. It grows when a heartbeat was later than the lease: then other
        members may have considered this one dead."""
        self._alive_until = 0.0
        """By the clock of ``suspend_aware_s``."""
        self._notify = notify
        self._emit = partial(observer, service=service, member=name)
        self.before_release: BeforeRelease = release_at_once
        self.choose_releases: ChooseReleases = release_last_taken
        self.retiring = False
        """This member is about to leave: its capacity is 0, so that the other members take what it releases."""
        self._renewals = 0
        self._check_consumers_at = 0.0
        self._unconfirmed: set[str] = set()
        """Streams that this member may have taken under a new token without receiving the reply."""
        self._namesake_logged = False
        self.malformed: set[str] = set()
        """Streams that cannot be owned, because their owner records were not written by a member."""
        self._malformed_rows: set[str] = set()

    # --- membership ---

    async def join(self) -> None:
        """Creates the group at the start of the stream, so that earlier announcements are delivered too."""
        await self.broker.create_group(self.stream, self.group, start="0")

    async def heartbeat(self) -> None:
        """Extends the row of this member, and reads the table of members."""
        asked_at = suspend_aware_s()
        self.view = await self._send_heartbeat(self.settings.lease_ms)
        # Compared when the reply arrives: a heartbeat that was sent in time may have been delayed for longer than the
        # lease.
        if suspend_aware_s() > self._alive_until:
            self.run += 1
        self._alive_until = max(self._alive_until, asked_at + self.settings.lease_ms / 1000)

    def renew_in_thread(self, broker: BlockingBroker) -> None:
        """The heartbeat, and the renewal of the Go client's locks, from a thread while the event loop is blocked.

        The owner records need none: they count while their member's row is alive. The lease is extended only if the
        reply came within it; otherwise the next heartbeat of the event loop starts a new run. It may be extended by
        less than the server granted, if the event loop extends it at the same moment, and never by more.
        """
        asked_at = suspend_aware_s()
        broker.run(
            lease_scripts.heartbeat,
            self.stream,
            self.name,
            lease_ms=self.settings.lease_ms,
            owned=len(self.owned),
            capacity=self._capacity,
        )
        if suspend_aware_s() <= self._alive_until:
            self._alive_until = max(self._alive_until, asked_at + self.settings.lease_ms / 1000)
        locks = [key for lease in list(self.owned.values()) for key in lease.locks]
        broker.run(lease_scripts.renew_leases, [], locks, lock_ttl_ms=self.settings.lease_ms)

    @property
    def _capacity(self) -> int:
        return 0 if self.retiring else self.settings.capacity

    def leave_in_thread(self, broker: BlockingBroker) -> None:
        """Removes the row that a thread may have written after this member left."""
        broker.run(lease_scripts.heartbeat, self.stream, self.name, lease_ms=0, owned=0, capacity=0)

    def certain_until(self, token: FencingToken) -> float:
        """Until when (monotonic seconds) no other member can have taken the stream; 0 if that is not certain."""
        lease = self.owned.get(token.stream)
        if lease is None or lease.token != token or lease.run != self.run:
            return 0.0
        # Evaluated for each use: if the machine was suspended meanwhile, only the lease's clock has gone on.
        return time.monotonic() + (self._alive_until - suspend_aware_s())

    async def _send_heartbeat(self, lease_ms: int) -> View:
        now_ms, announced, rows = await self.broker.run(
            lease_scripts.heartbeat,
            self.stream,
            self.name,
            lease_ms=lease_ms,
            owned=len(self.owned),
            capacity=self._capacity,
        )
        members, malformed = parse_members(rows)
        for name in malformed.keys() - self._malformed_rows:
            log.error(
                "row %r of the members of %r is malformed and is ignored: %r. Find what wrote it, then delete it",
                *(name, self.stream, malformed[name][:100]),
            )
        self._malformed_rows = set(malformed)
        return View(now_ms, announced, members)

    async def leave(self) -> None:
        """Releases every stream at once, so that no lease has to expire."""
        for start in range(0, len(leases := list(self.owned.values())), MAX_STREAMS_PER_STEP):
            await self._release_leases(leases[start : start + MAX_STREAMS_PER_STEP])
        await self._send_heartbeat(0)
        await self._delete_consumer(self.name)

    async def forget_consumers(self) -> None:
        """Removes dead consumers without pending entries: each restart under a new name leaves one.

        That it has none is checked in the same atomic step. A consumer that was deleted in error (of a Go member, which
        has no row) is created again by its next read.
        """
        if time.monotonic() < self._check_consumers_at:
            return
        self._check_consumers_at = time.monotonic() + 4 * self.settings.lease_ms / 1000
        alive = living(self.view.members, self.view.now_ms)
        consumers = await self.broker.consumer_info(self.stream, self.group)
        dead = [
            consumer.name
            for consumer in consumers
            if not consumer.pending
            and consumer.idle_ms > 2 * self.settings.lease_ms
            and consumer.name not in alive
            and consumer.name not in (UNOWNED, DUPLICATES)
        ]
        for name in dead[:MAX_STREAMS_PER_STEP]:
            await self._delete_consumer(name)

    async def _delete_consumer(self, name: str) -> None:
        try:
            await self.broker.delete_consumer(self.stream, self.group, name)
        except (ConsumerHasPending, NoSuchGroup, NoSuchStream):
            pass  # live members first take over its entries

    # --- renewal ---

    async def renew(self) -> None:
        """Renews every lease in one round trip per node. Disowns streams that other members have taken."""
        leases = list(self.owned.values())
        if not leases:
            return
        began = time.perf_counter()
        records, values = await self.broker.run(
            lease_scripts.renew_leases,
            [lease.fence.key for lease in leases],
            [key for lease in leases for key in lease.locks],
            lock_ttl_ms=self.settings.lease_ms,
        )
        locks = self._effective_locks([lease.locks for lease in leases], values)
        vanished: list[Lease] = []
        unlocked: list[Lease] = []
        unverified: list[Lease] = []
        taken_over: list[Lease] = []
        for lease, record, lock in zip(leases, records, locks, strict=True):
            if self.owned.get(lease.stream) is not lease:
                continue  # finished or released before the reply arrived
            if isinstance(record, MillstreamError) or isinstance(lock, MillstreamError):
                self._report_unanswered(lease.stream, record if isinstance(record, MillstreamError) else lock)
                continue  # no member takes it while this one sends heartbeats; the next round tries again
            if record != lease.fence.record:
                self._disown(lease)
                self._check_namesake(lease, record)
                (vanished if record is None else taken_over).append(lease)
            elif lease.run != self.run:
                unverified.append(lease)
            elif self.settings.go_locks and lock is None:
                unlocked.append(lease)
            elif self.settings.go_locks and lock != self._name_bytes:
                await self.broker.run(lease_scripts.release_lease, lease.stream, lease.fence.record)
                self._disown(lease)
        if taken_over:
            log.warning(
                "%d streams of member %r, such as %r, were taken over by other members: this process was paused, its "
                "server was away, or its event loop was blocked, for longer than lease_ms (%d)",
                *(len(taken_over), self.name, taken_over[0].stream, self.settings.lease_ms),
            )
        if unlocked:
            await self._lock(unlocked)
        if vanished:
            await self._reannounce(vanished)
        if unverified:
            await self._retake_leases(unverified)
        self._renewals += 1
        if self._renewals % REPAIR_EVERY == 0:
            await self._repair_announcements()
        self._emit("assignment.renewed", leases=len(leases), seconds=time.perf_counter() - began)

    def _check_namesake(self, lease: Lease, record: bytes | None) -> None:
        """Logs a token under the name of this member that this member did not take: another process uses the name."""
        taken_here = lease.stream in self._unconfirmed
        self._unconfirmed.discard(lease.stream)
        try:
            owner = OwnerRecord.parse(record).member
        except MalformedOwnerRecord as error:
            self._report_unanswered(lease.stream, error)
            return
        if owner == self.name and not taken_here and not self._namesake_logged:
            self._namesake_logged = True
            log.error(
                "another process is a member of %r under the same name %r: it has taken stream %r. The two take each "
                "other's streams repeatedly. Give each process its own member name, or none.",
                *(self.stream, self.name, lease.stream),
            )

    def _report_unanswered(self, stream: str, error: object) -> None:
        """Reports the error of one stream while other streams were renewed. The next round tries again."""
        if isinstance(error, MalformedOwnerRecord):
            if stream not in self.malformed:
                self.malformed.add(stream)
                log.error("stream %r cannot be owned: %s", stream, error)
                self._emit("assignment.unanswered", stream=stream, error=str(error))
            return
        log.warning("the lease of stream %r could not be read or written: %s", stream, error)
        self._emit("assignment.unanswered", stream=stream, error=str(error))

    def _disown(self, lease: Lease) -> None:
        del self.owned[lease.stream]
        self._notify(StreamDisowned(lease.stream, lease.lbs_id, lease.info, lease.token))
        self._emit("assignment.disowned", stream=lease.stream)

    async def _retake_leases(self, leases: Sequence[Lease]) -> None:
        """Takes leases again after a heartbeat that was later than the lease, although the records still name this
        member.

        Another member that considered this one dead may be about to take them. The compare-and-set of the record lets
        one of the two succeed.
        """
        run = self.run  # read before the request, because heartbeats continue meanwhile
        self._unconfirmed.update(lease.stream for lease in leases)
        numbers = await self.broker.run(
            lease_scripts.take_leases, self.name, [(lease.stream, lease.fence.record) for lease in leases]
        )
        for lease, number in zip(leases, numbers, strict=True):
            if not isinstance(number, MillstreamError):
                self._unconfirmed.discard(lease.stream)
            if self.owned.get(lease.stream) is not lease:
                continue
            if isinstance(number, MillstreamError):
                self._report_unanswered(lease.stream, number)
                continue  # still unverified: the next renewal tries again
            self._disown(lease)
            if number is not None:
                token = FencingToken(lease.stream, self.name, number)
                self.owned[lease.stream] = Lease(token, lease.lbs_id, lease.info, run, lease.locks)
                self._notify(StreamAdded(lease.stream, lease.lbs_id, lease.info, token, self.name))
                self._emit("assignment.taken", stream=lease.stream, taken_from=self.name)

    async def _repair_announcements(self) -> None:
        """Repairs the pending list: the announcement of each owned stream exists, and is pending for this member."""
        leases = list(self.owned.values())
        try:
            present = await self._claim_entries([lease.lbs_id for lease in leases])
        except NoSuchGroup:
            await self._recreate_group()
            present = set()
        await self._reannounce([lease for lease in leases if lease.lbs_id not in present])

    async def _claim_entries(self, ids: Sequence[EntryId]) -> set[EntryId]:
        """Claims entries of the load-balancer stream for this member; returns the ids of those that exist."""
        claimed: set[EntryId] = set()
        for start in range(0, len(ids), MAX_STREAMS_PER_STEP):
            chunk = ids[start : start + MAX_STREAMS_PER_STEP]
            claimed.update(await self.broker.xclaim_ids(self.stream, self.group, self.name, chunk, min_idle_ms=0))
        return claimed

    async def _reannounce(self, leases: Sequence[Lease]) -> None:
        """Announces streams again whose announcements the server has lost (FLUSHALL, a failover): only the owner knows
        them."""
        if not leases:
            return
        entries = await self.broker.run(entries_at, self.stream, [lease.lbs_id for lease in leases])
        gone = [lease for lease, entry in zip(leases, entries, strict=True) if entry is None]
        if not gone:
            return
        log.warning("the server has lost the announcements of %d streams; they are announced again", len(gone))
        announcements = [Announcement(lease.stream, lease.info) for lease in gone]
        ids = await self.broker.run(add_announcements, self.stream, announcements)
        for lease, lbs_id in zip(gone, ids, strict=True):
            lease.lbs_id, lease.locks = lbs_id, self._lock_keys(lease.stream, lbs_id)

    async def _recreate_group(self) -> None:
        log.warning("group %r of %r does not exist any more; it is created again", self.group, self.stream)
        await self.join()

    def _lock_keys(self, stream: str, lbs_id: EntryId) -> list[bytes]:
        """The lock keys of a stream that Go members check: one for each separator in use."""
        if not self.settings.go_locks:
            return []
        return [lock_key(stream, lbs_id, separator) for separator in self.settings.go_lock_separators]

    async def _lock(self, leases: Sequence[Lease]) -> list[str]:
        """Takes the locks of the Go client. Releases and returns the streams that a Go member has locked."""
        flat = [key for lease in leases for key in lease.locks]
        granted = iter(await self.broker.run(lease_scripts.lock_keys, flat, self.name, ttl_ms=self.settings.lease_ms))
        refused: list[Lease] = []
        for lease in leases:
            replies = [next(granted) for _ in lease.locks]
            error = next((reply for reply in replies if isinstance(reply, MillstreamError)), None)
            if error is not None:
                self._report_unanswered(lease.stream, error)
                if self.owned.get(lease.stream) is lease:
                    continue  # the next renewal tries again
            if not all(reply is True for reply in replies):
                refused.append(lease)
        await self._unlock(refused)
        released = await self.broker.run(
            lease_scripts.release_leases, [(lease.stream, lease.fence.record) for lease in refused]
        )
        for lease, gone in zip(refused, released, strict=True):
            if isinstance(gone, MillstreamError):
                self._report_unanswered(lease.stream, gone)
            if self.owned.get(lease.stream) is lease:
                self._disown(lease)
        return [lease.stream for lease in refused]

    async def _unlock(self, leases: Sequence[Lease]) -> None:
        keys = [key for lease in leases for key in lease.locks]
        if keys:
            await self.broker.run(lease_scripts.unlock_keys, keys, self.name)

    async def _release_leases(self, leases: Sequence[Lease]) -> None:
        await self.before_release([lease.stream for lease in leases])
        for lease in leases:
            self.owned.pop(lease.stream, None)
        # The records are released first, because they decide. Then the entries are moved to UNOWNED for other members.
        released = await self.broker.run(
            lease_scripts.release_leases, [(lease.stream, lease.fence.record) for lease in leases]
        )
        await self._unlock(leases)
        mine = [lease for lease, ok in zip(leases, released, strict=True) if ok is True]
        self._emit("assignment.released", streams=[lease.stream for lease in leases])
        parked = await self._park([lease.lbs_id for lease in mine])
        # Only this member knows streams whose records or announcements the server has lost, so they are announced
        # again. If the record names another member or was released, the stream changed hands while this member was
        # paused.
        for lease, ok in zip(leases, released, strict=True):
            if isinstance(ok, MillstreamError):
                self._report_unanswered(lease.stream, ok)
        others = [lease for lease, ok in zip(leases, released, strict=True) if ok is not True]
        records, _ = await self._read([lease.stream for lease in others], [lease.lbs_id for lease in others])
        unknown = [lease for lease in mine if lease.lbs_id not in parked]
        unknown += [lease for lease, record in zip(others, records, strict=True) if record is None]
        await self._reannounce(unknown)

    async def _read(self, streams: Sequence[str], ids: Sequence[EntryId]) -> tuple[list[Answer], list[Answer]]:
        """Owner records, and the effective lock of each stream."""
        keys = [self._lock_keys(stream, lbs_id) for stream, lbs_id in zip(streams, ids, strict=True)]
        records, values = await self.broker.run(
            lease_scripts.read_leases, streams, [key for each in keys for key in each]
        )
        await self._remove_dead_locks([key for each in keys for key in each], values)
        for index, (stream, record) in enumerate(zip(streams, records, strict=True)):
            try:
                if not isinstance(record, MillstreamError):
                    OwnerRecord.parse(record)
                    self.malformed.discard(stream)
            except MalformedOwnerRecord as error:
                records[index] = error
        return records, self._effective_locks(keys, values)

    async def _remove_dead_locks(self, keys: Sequence[bytes], values: list[Answer]) -> None:
        """Removes locks of members whose row has expired, and replaces them in ``values`` by None.

        Redis stores the expiry of a lock as a time of its wall clock: after the clock was set back, the lock of a dead
        member would outlive its row. Go members have no rows, so their locks are not removed.
        """
        alive = living(self.view.members, self.view.now_ms)
        dead = {to_bytes(name) for name in self.view.members if name not in alive and name != self.name}
        stale: dict[bytes, list[bytes]] = {}
        for index, (key, value) in enumerate(zip(keys, values, strict=True)):
            if isinstance(value, bytes) and value in dead:
                stale.setdefault(value, []).append(key)
                values[index] = None
        for owner, owned_keys in stale.items():
            await self.broker.run(lease_scripts.unlock_keys, owned_keys, owner)

    def _effective_locks(self, keys: Sequence[Sequence[bytes]], values: list[Answer]) -> list[Answer]:
        """The effective lock of each stream: of another member, none, or of this member."""
        if len(self.settings.go_lock_separators) == 1 and self.settings.go_locks:
            return values  # one lock per stream
        remaining = iter(values)
        return [effective_lock([next(remaining) for _ in each], self.name) for each in keys]

    async def _read_one(self, stream: str, lbs_id: EntryId) -> tuple[bytes | None, bytes | None]:
        [record], [lock] = await self._read([stream], [lbs_id])
        if isinstance(record, MillstreamError):
            raise record
        if isinstance(lock, MillstreamError):
            raise lock
        return record, lock

    async def _park(self, ids: Sequence[EntryId], consumer: str = UNOWNED, *, min_idle_ms: int = 0) -> set[EntryId]:
        """Moves entries to a consumer name that no member uses; returns the ids of those that were moved."""
        if not ids:
            return set()
        return set(await self.broker.xclaim_ids(self.stream, self.group, consumer, ids, min_idle_ms=min_idle_ms))
