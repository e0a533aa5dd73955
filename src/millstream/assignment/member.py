"""The steps of a member: take its share of the streams, take over, notify of expired leases, claim, finish, release.

A step runs to its end; the loops are in ``client``. The pending list of the load-balancer stream only shows where to
scan: entries of dead consumers and of the consumer UNOWNED. The owner record decides who owns a stream.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from millstream.assignment.announcement import Announcement
from millstream.assignment.errors import MalformedAnnouncement, NotTheOwner, StreamIsOwned
from millstream.assignment.leases import (
    PAGE_SIZE,
    Candidate,
    FencingToken,
    Lease,
    OwnerRecord,
    Page,
    is_free,
    without_recent_reads,
)
from millstream.assignment.membership import Member as Row
from millstream.assignment.membership import Settings, living, targets
from millstream.assignment.notifications import (
    Notification,
    StreamAdded,
    StreamDisowned,
    StreamExpired,
    StreamTerminated,
)
from millstream.assignment.ownership import DUPLICATES, MAX_STREAMS_PER_STEP, REPAIR_EVERY, UNOWNED, Ownership
from millstream.broker import Broker
from millstream.broker.operations.streams import entries_at
from millstream.broker.scripts import leases as lease_scripts
from millstream.errors import MillstreamError, NoSuchGroup
from millstream.model import Entry, EntryId, Observer, PendingEntry, quiet
from millstream.wire import to_name

log = logging.getLogger(__name__)


class AssignmentMember(Ownership):
    """A member that takes its share of the streams and hands over the excess."""

    def __init__(
        self,
        broker: Broker,
        service: str,
        name: str,
        settings: Settings,
        notify: Callable[[Notification], None],
        observer: Observer = quiet,
    ) -> None:
        super().__init__(broker, service, name, settings, notify, observer)
        self.accepts: Callable[[str], bool] | None = None
        self._pages: dict[str, Page] = {}
        self._tried = 0
        self._expired_notified_at: dict[EntryId, float] = {}
        """When the application was last notified of a stream whose owner died (monotonic seconds)."""
        self._expired_pages: dict[str, Page] = {}
        self._duplicates = 0
        """Pending entries of DUPLICATES at the previous call of ``place``."""
        self._check_duplicates_at = 0.0

    # --- take and hand over ---

    async def place(self, capacity: int) -> bool:
        """Moves towards this member's share: hands over the excess, or takes up to ``capacity`` streams.

        Returns whether another step should follow at once: a stream was moved, or another member took it first.
        """
        if self.view.announced < len(self.owned):
            # Either this member was paused and has lost streams, or the server has lost announcements. The records show
            # which. If it handed streams over before, no process would know of announcements that the server lost.
            await self.renew()
            await self._repair_announcements()
            return False
        try:
            holders = (await self.broker.xpending(self.stream, self.group)).consumers
        except NoSuchGroup:
            await self._recreate_group()
            return False
        alive = living(self.view.members, self.view.now_ms)
        target = targets(alive, await self._count_streams(holders, alive)).get(self.name, 0)
        chosen = self.choose_releases(list(self.owned), max(0, len(self.owned) - target))
        excess = [self.owned[stream] for stream in chosen if stream in self.owned][:MAX_STREAMS_PER_STEP]
        if excess:
            await self._release_leases(excess)
            for lease in excess:
                self._notify(StreamDisowned(lease.stream, lease.lbs_id, lease.info, lease.token))
            self._emit("assignment.handed_over", streams=len(excess))
            return True
        allowed = min(target - len(self.owned), capacity, MAX_STREAMS_PER_STEP)
        if allowed <= 0:
            return False
        tried_before = self._tried
        try:
            taken = await self._adopt(allowed, alive, holders)
            if taken < allowed:
                await self._take_new(allowed - taken, alive)
        except NoSuchGroup:
            await self._recreate_group()
        return self._tried > tried_before

    async def _take_new(self, count: int, alive: Mapping[str, Row]) -> int:
        deliveries = await self.broker.xreadgroup(self.stream, self.group, self.name, count=count)
        entries = [Entry(item.id, item.fields) for item in deliveries if item.fields is not None]
        candidates = await self._parse_entries(entries, dict.fromkeys((entry.id for entry in entries), self.name))
        return await self._take(candidates, alive)

    async def _count_streams(self, holders: Mapping[str, int], alive: Mapping[str, Row]) -> int:
        """The number of different announced streams, without the duplicates that are known."""
        before, self._duplicates = self._duplicates, holders.get(DUPLICATES, 0)
        if self._duplicates and time.monotonic() >= self._check_duplicates_at:
            self._check_duplicates_at = time.monotonic() + self.settings.renew_interval_ms / 1000
            await self._return_duplicates(alive)
        # The two numbers are not read atomically. The smaller of two readings makes the count too high at worst. If it
        # were too low, this member would hand over a stream and take it back at once.
        return max(0, self.view.announced - min(before, self._duplicates))

    async def _return_duplicates(self, alive: Mapping[str, Row]) -> None:
        """Examines some of the duplicates. Those whose stream has no owner any more return to UNOWNED."""
        page = self._pages.setdefault(DUPLICATES, Page())
        pending = await self.broker.xpending_range(
            self.stream, self.group, start=page.start, count=PAGE_SIZE, consumer=DUPLICATES
        )
        ids = [item.id for item in page.next_window(pending, 2 * MAX_STREAMS_PER_STEP)] if pending else []
        candidates = [
            candidate
            for candidate in await self._candidates(ids, DUPLICATES)
            if candidate.announcement.stream not in self.owned
        ]
        # With takeover="notify" the application claims the streams of a dead member.
        returned = {
            candidate.announcement.stream: candidate.lbs_id
            for candidate, record in reversed(await self._free_candidates(candidates, alive))
            if self.settings.takeover == "automatic" or not OwnerRecord.parse(record).member
        }
        await self._park(list(returned.values()))

    async def _adopt(self, count: int, alive: Mapping[str, Row], pending_of: Mapping[str, int]) -> int:
        """Takes streams whose announcements are pending for dead members, for UNOWNED, or for this member without a
        lease."""
        holders = dict(pending_of)
        mine = holders.pop(self.name, 0)
        names = [name for name in holders if name not in alive and name != DUPLICATES]
        if self.settings.takeover == "notify":
            names = [name for name in names if name == UNOWNED]  # the application claims those of dead members
        if mine != len(self.owned):
            names.append(self.name)
        taken = 0
        for holder in names:
            if taken >= count:
                break
            taken += await self._adopt_from(holder, count - taken, alive)
        return taken

    async def _adopt_from(self, holder: str, count: int, alive: Mapping[str, Row]) -> int:
        page = self._pages.setdefault(holder, Page())
        pending = await self.broker.xpending_range(
            self.stream, self.group, start=page.start, count=PAGE_SIZE, consumer=holder
        )
        # Each member begins at another entry of the page, so that members do not compete for the same streams. The next
        # scan continues from there, so that entries that cannot be taken yet do not hide the entries after them.
        ahead = sorted(alive).index(self.name) * len(pending) // len(alive) if self.name in alive else 0
        pending = page.next_window([*pending[ahead:], *pending[:ahead]], 2 * count)
        pending = self._takeable(holder, pending)
        owned_ids = {lease.lbs_id for lease in self.owned.values()}
        ids = [item.id for item in pending if item.id not in owned_ids]
        return await self._take(await self._candidates(ids, holder), alive, at_most=count)

    async def _candidates(self, ids: Sequence[EntryId], holder: str) -> list[Candidate]:
        """The announcements with these ids. Ids of deleted entries are removed from the pending list."""
        if not ids:
            return []
        entries = await self.broker.run(entries_at, self.stream, ids)
        gone = [entry_id for entry_id, entry in zip(ids, entries, strict=True) if entry is None]
        if gone:
            await self.broker.xack(self.stream, self.group, gone)
        present = [entry for entry in entries if entry is not None]
        return await self._parse_entries(present, dict.fromkeys((entry.id for entry in present), holder))

    def _takeable(self, holder: str, pending: Sequence[PendingEntry]) -> list[PendingEntry]:
        """Without entries that a Go member may be about to lock."""
        is_python_member = not self.settings.go_locks or holder in (self.name, UNOWNED) or holder in self.view.members
        return list(pending) if is_python_member else without_recent_reads(pending)

    async def notify_expired(self, capacity: int) -> None:
        """Notifies of up to ``capacity`` streams whose owner is dead: each again after a lease, until it is claimed.

        This does not depend on the share of this member: a member with a full share may claim streams that no other
        member claims.
        """
        now, interval_s = time.monotonic(), self.settings.lease_ms / 1000
        alive = living(self.view.members, self.view.now_ms)
        holders = (await self.broker.xpending(self.stream, self.group)).consumers
        for holder in [name for name in holders if name not in alive and name not in (self.name, UNOWNED, DUPLICATES)]:
            page = self._expired_pages.setdefault(holder, Page())
            pending = await self.broker.xpending_range(
                self.stream, self.group, start=page.start, count=PAGE_SIZE, consumer=holder
            )
            window = self._takeable(holder, page.next_window(pending, 2 * MAX_STREAMS_PER_STEP))
            due = [
                item.id for item in window if now - self._expired_notified_at.get(item.id, -interval_s) >= interval_s
            ]
            entries = await self.broker.run(entries_at, self.stream, due)
            candidates = await self._parse_entries(
                [entry for entry in entries if entry is not None], dict.fromkeys(due, holder)
            )
            for candidate, record in await self._free_candidates(candidates, alive):
                if capacity <= 0:
                    return
                capacity -= 1
                self._expired_notified_at[candidate.lbs_id] = now
                owner, stream = OwnerRecord.parse(record), candidate.announcement.stream
                token = FencingToken(stream, owner.member, owner.number)
                self._notify(StreamExpired(stream, candidate.lbs_id, candidate.announcement.info, token))
        # Claimed and finished streams are not notified again, and are removed here.
        notified = self._expired_notified_at.items()
        self._expired_notified_at = {lbs_id: at for lbs_id, at in notified if now - at < 10 * interval_s}
        self._expired_pages = {holder: page for holder, page in self._expired_pages.items() if holder in holders}

    async def _parse_entries(self, entries: Sequence[Entry], holders: Mapping[EntryId, str]) -> list[Candidate]:
        candidates = []
        for entry in entries:
            try:
                announcement = Announcement.parse(entry.fields)
            except MalformedAnnouncement as error:
                await self._dead_letter(entry, error)
            else:
                candidates.append(Candidate(entry.id, announcement, holders[entry.id]))
        return candidates

    async def _dead_letter(self, entry: Entry, error: MalformedAnnouncement) -> None:
        """Moves the entry to the dead-letter stream of the load-balancer stream."""
        log.warning("dead-lettered entry %s of %r: %s", entry.id, self.stream, error)
        await self.broker.run(
            lease_scripts.dead_letter_announcement, self.stream, self.group, entry.id, entry.fields, str(error)
        )
        self._emit("assignment.malformed", id=str(entry.id), error=str(error))

    async def _take(
        self, candidates: Sequence[Candidate], alive: Mapping[str, Row], at_most: int = MAX_STREAMS_PER_STEP
    ) -> int:
        """Takes the leases of free streams. If two members try, the owner record lets one of them succeed."""
        duplicates = self._duplicates_among(candidates)
        first_of_each = {
            c.announcement.stream: c
            for c in reversed(candidates)
            if c.announcement.stream not in self.owned and (self.accepts is None or self.accepts(c.announcement.stream))
        }
        free = (await self._free_candidates(list(first_of_each.values())[::-1], alive))[:at_most]
        taken = await self._take_leases(free)
        taken_ids = {candidate.lbs_id for candidate, _ in taken}
        # Entries that this member has read and may not own (yet) are moved to UNOWNED, which every member scans.
        parked = [
            c.lbs_id
            for c in candidates
            if c.holder == self.name and c.lbs_id not in taken_ids and c.lbs_id not in duplicates
        ]
        await self._park(parked)
        await self._park(duplicates, DUPLICATES)
        await self._park_others_duplicates(candidates, alive)
        return len(taken)

    def _duplicates_among(self, candidates: Sequence[Candidate]) -> list[EntryId]:
        """Candidates whose stream this member owns, or which an earlier candidate announces."""
        streams = set(self.owned)
        duplicates = []
        for candidate in candidates:
            if candidate.announcement.stream in streams:
                duplicates.append(candidate.lbs_id)
            streams.add(candidate.announcement.stream)
        return duplicates

    async def _park_others_duplicates(self, candidates: Sequence[Candidate], alive: Mapping[str, Row]) -> None:
        """Moves announcements to DUPLICATES whose stream a live member owns under another announcement.

        Only entries that were idle for a while: the owner may have taken the stream by this entry, and then claims the
        entry with its next repair of the pending list.
        """
        waiting = [c for c in candidates if c.holder != self.name and c.announcement.stream not in self.owned]
        records, locks = await self._read([c.announcement.stream for c in waiting], [c.lbs_id for c in waiting])
        duplicates = []
        for candidate, record, lock in zip(waiting, records, locks, strict=True):
            if lock is None and not isinstance(record, MillstreamError) and OwnerRecord.parse(record).member in alive:
                duplicates.append(candidate.lbs_id)
        idle_ms = (REPAIR_EVERY + 1) * self.settings.renew_interval_ms
        await self._park(duplicates, DUPLICATES, min_idle_ms=idle_ms)

    async def _free_candidates(
        self, candidates: Sequence[Candidate], alive: Mapping[str, Row]
    ) -> list[tuple[Candidate, bytes | None]]:
        """The candidates whose stream is free, each with the owner record that was compared."""
        records, locks = await self._read(
            [each.announcement.stream for each in candidates], [each.lbs_id for each in candidates]
        )
        free: list[tuple[Candidate, bytes | None]] = []
        for candidate, record, lock in zip(candidates, records, locks, strict=True):
            if isinstance(record, MillstreamError) or isinstance(lock, MillstreamError):
                error = record if isinstance(record, MillstreamError) else lock
                self._report_unanswered(candidate.announcement.stream, error)
            elif is_free(record, lock, self.name, alive):
                free.append((candidate, record))
        return free

    async def _take_leases(self, free: Sequence[tuple[Candidate, bytes | None]]) -> list[tuple[Candidate, Lease]]:
        if not free:
            return []
        began = time.perf_counter()
        run = self.run  # read before the request: a late reply must not make the lease look newer than its heartbeat
        numbers = await self.broker.run(
            lease_scripts.take_leases, self.name, [(c.announcement.stream, record) for c, record in free]
        )
        # Errors do not count: an immediate next step would fail again.
        self._tried += sum(not isinstance(number, MillstreamError) for number in numbers)
        won: list[tuple[Candidate, Lease, bytes | None]] = []
        for (candidate, record), number in zip(free, numbers, strict=True):
            if isinstance(number, MillstreamError):
                # It may have been taken although the reply was lost. Then the next scan of this member takes it again.
                self._report_unanswered(candidate.announcement.stream, number)
            elif number is not None:
                token = FencingToken(candidate.announcement.stream, self.name, number)
                locks = self._lock_keys(token.stream, candidate.lbs_id)
                lease = Lease(token, candidate.lbs_id, candidate.announcement.info, run, locks)
                won.append((candidate, lease, record))
        if self.settings.go_locks:
            refused = set(await self._lock([lease for _, lease, _ in won]))
            won = [item for item in won if item[1].stream not in refused]
        # The lease is taken before the entry is claimed: a crash in between leaves an entry of a dead consumer, and
        # scans compare its record. In the other order an entry could stay with a consumer that has no lease.
        moved = [c.lbs_id for c, _, _ in won if c.holder != self.name]
        if moved:
            await self._claim_entries(moved)
        self._emit("assignment.claimed", tried=len(free), won=len(won), seconds=time.perf_counter() - began)
        for candidate, lease, record in won:
            previous_owner = OwnerRecord.parse(record).member
            self.owned[lease.stream] = lease
            self._notify(StreamAdded(lease.stream, lease.lbs_id, lease.info, lease.token, previous_owner or None))
            self._emit("assignment.taken", stream=lease.stream, taken_from=previous_owner)
            self._expired_notified_at.pop(candidate.lbs_id, None)
        return [(candidate, lease) for candidate, lease, _ in won]

    # --- called by the application ---

    async def claim(self, stream: str, lbs_id: EntryId) -> StreamAdded:
        """Takes one stream over now, also beyond this member's share. Raises StreamIsOwned if a live member owns it."""
        if stream in self.owned:
            raise StreamIsOwned(stream, self.name)
        await self.heartbeat()
        alive = living(self.view.members, self.view.now_ms)
        [entry] = await self.broker.run(entries_at, self.stream, [lbs_id])
        if entry is None:
            raise NotTheOwner(stream)
        record, lock = await self._read_one(stream, lbs_id)
        owner = OwnerRecord.parse(record).member
        if not is_free(record, lock, self.name, alive):
            raise StreamIsOwned(stream, owner if owner in alive else to_name(lock or b""))
        candidate = Candidate(lbs_id, Announcement.parse(entry.fields), "")
        won = await self._take_leases([(candidate, record)])
        if not won:
            record, _ = await self._read_one(stream, lbs_id)
            raise StreamIsOwned(stream, OwnerRecord.parse(record).member)
        lease = won[0][1]
        return StreamAdded(lease.stream, lease.lbs_id, lease.info, lease.token, owner or None)

    async def finish(self, stream: str) -> None:
        """Ends the stream: its announcement is acknowledged and deleted. No other method does that."""
        lease = self._lease(stream)
        if not await self._is_owner(lease):
            self._disown(lease)
            raise NotTheOwner(stream)
        if not await self._end_announcement(lease):
            # A failover may have lost the last claim of the entry, or that it was read: hence FORCE. The owner record
            # still names this member.
            claimed = await self.broker.xclaim_ids(
                self.stream, self.group, self.name, [lease.lbs_id], min_idle_ms=0, force=True
            )
            if claimed and not await self._end_announcement(lease):
                raise NotTheOwner(stream)
        self.owned.pop(stream, None)
        self._check_duplicates_at = 0.0  # the stream may have been announced again meanwhile
        self._notify(StreamTerminated(stream, lease.lbs_id, lease.info, lease.token))
        self._emit("assignment.finished", stream=stream)
        try:
            await self.broker.run(lease_scripts.release_lease, stream, lease.fence.record)
            await self._unlock([lease])
        except MillstreamError as error:
            # Not raised: the announcement is gone, so a repeated finish would fail. The record still names this member,
            # which may take the stream if it is announced again; other members may after this member has left.
            self._report_unanswered(stream, error)

    async def _end_announcement(self, lease: Lease) -> bool:
        step = lease_scripts.finish_announcement
        return await self.broker.run(step, self.stream, self.group, self.name, lease.lbs_id)

    async def release(self, stream: str) -> None:
        """Releases one stream, unfinished: another member takes it."""
        lease = self._lease(stream)
        await self._release_leases([lease])
        self._notify(StreamDisowned(stream, lease.lbs_id, lease.info, lease.token))

    async def _is_owner(self, lease: Lease) -> bool:
        record, _ = await self._read_one(lease.stream, lease.lbs_id)
        return record == lease.fence.record

    def _lease(self, stream: str) -> Lease:
        if stream not in self.owned:
            raise NotTheOwner(stream)
        return self.owned[stream]
