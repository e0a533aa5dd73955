"""One member's steps: place, take over, tell of orphans, claim, finish, release. Each runs to its end; no loop.

The load-balancer stream's pending list only says where to look: entries of dead consumers, and of the consumer that
stands for nobody. The owner record decides.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from millstream.assignment.announcement import Announcement
from millstream.assignment.errors import MalformedAnnouncement, NotTheOwner, StreamIsOwned
from millstream.assignment.leases import (
    PAGE,
    Candidate,
    Lease,
    OwnerRecord,
    Page,
    Token,
    is_free,
    without_fresh,
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
from millstream.assignment.ownership import NOBODY, STEP, Ownership
from millstream.broker import Broker, entries_at
from millstream.broker import leases as lease_steps
from millstream.errors import MillstreamError, NoSuchGroup
from millstream.model import Entry, EntryId, Observer, PendingEntry, quiet
from millstream.wire import to_name

log = logging.getLogger(__name__)


class AssignmentMember(Ownership):
    """A member that takes its share of the streams, and hands over what is too much."""

    def __init__(
        self,
        broker: Broker,
        service: str,
        name: str,
        settings: Settings,
        emit: Callable[[Notification], None],
        observer: Observer = quiet,
    ) -> None:
        super().__init__(broker, service, name, settings, emit, observer)
        self._pages: dict[str, Page] = {}
        self._tried = 0
        self._expired_told: dict[EntryId, float] = {}
        """When the application was last told of a stream whose owner died."""
        self._expired_pages: dict[str, Page] = {}

    # --- taking and handing over ---

    async def place(self, room: int) -> bool:
        """Moves towards this member's share: hands over what is too much, or takes up to ``room`` streams.

        True when it is worth another step at once: something moved, or rivals were quicker.
        """
        if self.view.announced < len(self.owned):
            # Either this member slept and does not own all of them any more, or the server lost announcements. The
            # records tell which; handing over before that would make the server's loss everybody's.
            await self.renew()
            await self._keep_announced()
            return False
        alive = living(self.view.members, self.view.now_ms)
        target = targets(alive, self.view.announced).get(self.name, 0)
        if len(self.owned) > target:
            excess = list(self.owned.values())[target:][:STEP]
            await self._give_back(excess)
            for lease in excess:
                self._emit(StreamDisowned(lease.stream, lease.lbs_id, lease.info, lease.token))
            self._tell("assignment.handed_over", streams=len(excess))
            return True
        allowed = min(target - len(self.owned), room, STEP)
        if allowed <= 0:
            return False
        tried_before = self._tried
        try:
            taken = await self._adopt(allowed, alive)
            if taken < allowed:
                await self._take_new(allowed - taken, alive)
        except NoSuchGroup:
            await self._make_group_again()
        return self._tried > tried_before

    async def _take_new(self, count: int, alive: Mapping[str, Row]) -> int:
        deliveries = await self.broker.xreadgroup(self.stream, self.group, self.name, count=count)
        found = [Entry(item.id, item.fields) for item in deliveries if item.fields is not None]
        candidates = await self._understand(found, dict.fromkeys((entry.id for entry in found), self.name))
        return await self._take(candidates, alive)

    async def _adopt(self, count: int, alive: Mapping[str, Row]) -> int:
        """Takes what lies in the pending list without an owner: of the dead, of nobody, and this member's leftovers."""
        holders = (await self.broker.xpending(self.stream, self.group)).consumers
        mine = holders.pop(self.name, 0)
        names = [name for name in holders if name not in alive]
        if self.settings.takeover == "notify":
            names = [name for name in names if name == NOBODY]  # the dead's are for the application to claim
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
            self.stream, self.group, start=page.start, count=PAGE, consumer=holder
        )
        # Each member begins elsewhere in the page, so that rivals do not all reach for the same streams; and goes on
        # from there in the next sweep, so that what cannot be taken yet does not hide what lies behind it.
        ahead = sorted(alive).index(self.name) * len(pending) // len(alive) if self.name in alive else 0
        pending = page.next_window([*pending[ahead:], *pending[:ahead]], 2 * count)
        pending = self._settled(holder, pending)
        held = {lease.lbs_id for lease in self.owned.values()}
        ids = [item.id for item in pending if item.id not in held]
        if not ids:
            return 0
        entries = await self.broker.run(entries_at, self.stream, ids)
        gone = [entry_id for entry_id, entry in zip(ids, entries, strict=True) if entry is None]
        if gone:
            await self.broker.xack(self.stream, self.group, gone)
        found = [entry for entry in entries if entry is not None]
        candidates = await self._understand(found, dict.fromkeys((entry.id for entry in found), holder))
        return await self._take(candidates, alive, at_most=count)

    def _settled(self, holder: str, pending: Sequence[PendingEntry]) -> list[PendingEntry]:
        known = not self.settings.go_locks or holder in (self.name, NOBODY) or holder in self.view.members
        return list(pending) if known else without_fresh(pending)

    async def tell_expired(self, room: int) -> None:
        """Tells of streams whose owner is dead, up to ``room`` of them: each again after a lease, until it is claimed.

        Whatever this member's share is: where nobody who was told before has claimed, somebody else may.
        """
        now, again = time.monotonic(), self.settings.lease_ms / 1000
        alive = living(self.view.members, self.view.now_ms)
        holders = (await self.broker.xpending(self.stream, self.group)).consumers
        for holder in [name for name in holders if name not in alive and name not in (self.name, NOBODY)]:
            page = self._expired_pages.setdefault(holder, Page())
            pending = await self.broker.xpending_range(
                self.stream, self.group, start=page.start, count=PAGE, consumer=holder
            )
            window = self._settled(holder, page.next_window(pending, 2 * STEP))
            due = [item.id for item in window if now - self._expired_told.get(item.id, -again) >= again]
            entries = await self.broker.run(entries_at, self.stream, due)
            candidates = await self._understand([one for one in entries if one is not None], dict.fromkeys(due, holder))
            for candidate, record in await self._free(candidates, alive):
                if room <= 0:
                    return
                room -= 1
                self._expired_told[candidate.lbs_id] = now
                owner, stream = OwnerRecord.parse(record), candidate.announcement.stream
                token = Token(stream, owner.member, owner.number)
                self._emit(StreamExpired(stream, candidate.lbs_id, candidate.announcement.info, token))
        # What was claimed or finished since is told no more: forget it.
        self._expired_told = {lbs_id: at for lbs_id, at in self._expired_told.items() if now - at < 10 * again}
        self._expired_pages = {holder: page for holder, page in self._expired_pages.items() if holder in holders}

    async def _understand(self, entries: Sequence[Entry], holders: Mapping[EntryId, str]) -> list[Candidate]:
        candidates = []
        for entry in entries:
            try:
                announcement = Announcement.parse(entry.fields)
            except MalformedAnnouncement as error:
                await self._bury(entry, error)
            else:
                candidates.append(Candidate(entry.id, announcement, holders[entry.id]))
        return candidates

    async def _bury(self, entry: Entry, error: MalformedAnnouncement) -> None:
        """To the dead letters beside the load-balancer stream, then out of it: the reader goes on."""
        log.warning("entry %s of %r was buried: %s", entry.id, self.stream, error)
        await self.broker.run(
            lease_steps.bury_announcement, self.stream, self.group, entry.id, entry.fields, str(error)
        )
        self._tell("assignment.malformed", id=str(entry.id), error=str(error))

    async def _take(self, candidates: Sequence[Candidate], alive: Mapping[str, Row], at_most: int = STEP) -> int:
        """Takes the leases of those that are free. Of two rivals the record beside the stream lets one win."""
        first_of_each = {
            c.announcement.stream: c for c in reversed(candidates) if c.announcement.stream not in self.owned
        }
        free = (await self._free(list(first_of_each.values())[::-1], alive))[:at_most]
        taken = await self._win(free)
        kept = {candidate.lbs_id for candidate, _ in taken}
        # What this member read and may not have (yet) waits under nobody's name, where every member's sweep looks.
        parked = [c.lbs_id for c in candidates if c.holder == self.name and c.lbs_id not in kept]
        await self._park(parked)
        return len(taken)

    async def _free(
        self, candidates: Sequence[Candidate], alive: Mapping[str, Row]
    ) -> list[tuple[Candidate, bytes | None]]:
        """Those that nobody holds, each with the record by which it was judged."""
        records, locks = await self._read(
            [one.announcement.stream for one in candidates], [one.lbs_id for one in candidates]
        )
        free: list[tuple[Candidate, bytes | None]] = []
        for candidate, record, lock in zip(candidates, records, locks, strict=True):
            if isinstance(record, MillstreamError) or isinstance(lock, MillstreamError):
                error = record if isinstance(record, MillstreamError) else lock
                self._unanswered(candidate.announcement.stream, error)
            elif is_free(record, lock, self.name, alive):
                free.append((candidate, record))
        return free

    async def _win(self, free: Sequence[tuple[Candidate, bytes | None]]) -> list[tuple[Candidate, Lease]]:
        if not free:
            return []
        began = time.perf_counter()
        run = (
            self.run
        )  # before the answer: a lease that a late answer tells of is no surer than the heartbeat before it
        numbers = await self.broker.run(
            lease_steps.take_leases, self.name, [(c.announcement.stream, record) for c, record in free]
        )
        # Only what was answered is worth another step at once: what was refused gets its pause.
        self._tried += sum(not isinstance(number, MillstreamError) for number in numbers)
        won: list[tuple[Candidate, Lease, bytes | None]] = []
        for (candidate, record), number in zip(free, numbers, strict=True):
            if isinstance(number, MillstreamError):
                # Perhaps it was taken all the same: then the record names this member, whose next sweep takes it anew.
                self._unanswered(candidate.announcement.stream, number)
            elif number is not None:
                token = Token(candidate.announcement.stream, self.name, number)
                locks = self._lock_keys(token.stream, candidate.lbs_id)
                lease = Lease(token, candidate.lbs_id, candidate.announcement.info, run, locks)
                won.append((candidate, lease, record))
        if self.settings.go_locks:
            refused = set(await self._lock([lease for _, lease, _ in won]))
            won = [item for item in won if item[1].stream not in refused]
        # The lease first, the pending list after: a crash in between leaves an entry of a dead consumer, which a
        # sweep judges by the record; the other way round, a stream could lie with a consumer that has no lease.
        moved = [c.lbs_id for c, _, _ in won if c.holder != self.name]
        if moved:
            await self._hold(moved)
        self._tell("assignment.claimed", tried=len(free), won=len(won), seconds=time.perf_counter() - began)
        for candidate, lease, record in won:
            before = OwnerRecord.parse(record).member
            self.owned[lease.stream] = lease
            self._emit(StreamAdded(lease.stream, lease.lbs_id, lease.info, lease.token, before or None))
            self._tell("assignment.taken", stream=lease.stream, taken_from=before)
            self._expired_told.pop(candidate.lbs_id, None)
        return [(candidate, lease) for candidate, lease, _ in won]

    # --- what the application asks for ---

    async def claim(self, stream: str, lbs_id: EntryId) -> StreamAdded:
        """Takes one stream over now, whatever this member's share is; StreamIsOwned while a living member holds it."""
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
        won = await self._win([(candidate, record)])
        if not won:
            record, _ = await self._read_one(stream, lbs_id)
            raise StreamIsOwned(stream, OwnerRecord.parse(record).member)
        lease = won[0][1]
        return StreamAdded(lease.stream, lease.lbs_id, lease.info, lease.token, owner or None)

    async def finish(self, stream: str) -> None:
        """The stream is done: its announcement is acknowledged and deleted. Nothing else does that."""
        lease = self._lease(stream)
        if not await self._still_mine(lease):
            self._disown(lease)
            raise NotTheOwner(stream)
        if not await self._end_announcement(lease):
            # A failover may have lost the last claim, or that it was read at all: hence by force. The record still says
            # that the entry is this member's.
            held = await self.broker.xclaim_ids(
                self.stream, self.group, self.name, [lease.lbs_id], min_idle_ms=0, force=True
            )
            if held and not await self._end_announcement(lease):
                raise NotTheOwner(stream)
        self.owned.pop(stream, None)
        self._emit(StreamTerminated(stream, lease.lbs_id, lease.info, lease.token))
        self._tell("assignment.finished", stream=stream)
        try:
            await self.broker.run(lease_steps.release_lease, stream, lease.guard.record)
            await self._unlock([lease])
        except MillstreamError as error:
            # Told all the same, for nobody can finish it once more. What stays names this member, who may take the
            # stream if it is announced again; and so may everybody once this member is gone.
            self._unanswered(stream, error)

    async def _end_announcement(self, lease: Lease) -> bool:
        step = lease_steps.finish_announcement
        return await self.broker.run(step, self.stream, self.group, self.name, lease.lbs_id)

    async def release(self, stream: str) -> None:
        """Gives one stream back, unfinished: another member takes it."""
        lease = self._lease(stream)
        await self._give_back([lease])
        self._emit(StreamDisowned(stream, lease.lbs_id, lease.info, lease.token))

    async def _still_mine(self, lease: Lease) -> bool:
        record, _ = await self._read_one(lease.stream, lease.lbs_id)
        return record == lease.guard.record

    def _lease(self, stream: str) -> Lease:
        if stream not in self.owned:
            raise NotTheOwner(stream)
        return self.owned[stream]
