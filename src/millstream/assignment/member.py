"""One member's steps: beat, renew, place, claim, release, finish, leave. Each runs to its end; no loop, no clock.

The owner record beside a data stream decides who owns it. The load-balancer stream's pending list only says where to
look: entries of dead consumers, and of the consumer that stands for nobody.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from millstream.assignment.announcement import Announcement, balancer_group, balancer_stream, lock_key
from millstream.assignment.errors import MalformedAnnouncement, NotTheOwner, StreamIsOwned
from millstream.assignment.leases import (
    PAGE,
    Candidate,
    Lease,
    OwnerRecord,
    Page,
    Token,
    View,
    is_free,
    lock_that_counts,
    without_fresh,
)
from millstream.assignment.notifications import (
    Notification,
    StreamAdded,
    StreamDisowned,
    StreamExpired,
    StreamTerminated,
)
from millstream.assignment.placement import Member as Row
from millstream.assignment.placement import living, targets
from millstream.assignment.settings import Settings
from millstream.broker import Broker, entries_at
from millstream.broker import leases as lease_steps
from millstream.errors import ConsumerHasPending, InvalidArgument, MillstreamError, NoSuchGroup, NoSuchStream
from millstream.model import Entry, EntryId, Observer, PendingEntry, quiet
from millstream.wire.names import to_name

log = logging.getLogger(__name__)

BeforeRelease = Callable[[Sequence[str]], Awaitable[None]]
"""Told of streams before they are given back: time to finish what is in flight, at most half a lease."""


async def release_at_once(streams: Sequence[str]) -> None:
    """Nobody has to be asked."""


NOBODY = "millstream:unowned"
"""The consumer under which released entries wait, so that a sweep finds them without looking at everybody's."""
STEP = 500
"""How many streams travel together while they are taken: small enough that renewals get their turn in between."""
TOUCH_EVERY = 3
"""Renewals between two repairs of the pending list; a Go member that starts claims what was idle for 40 s."""


class AssignmentMember:
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
        self.settings = settings
        self.stream = balancer_stream(service)
        self.group = balancer_group(service)
        self.owned: dict[str, Lease] = {}
        self.view = View(0, 0, {})
        self.run = 0
        """Grows whenever a beat came too late to be sure that nobody saw this member dead in between."""
        self._alive_until = 0.0
        self._emit = emit
        self._tell = partial(observer, service=service, member=name)
        self._pages: dict[str, Page] = {}
        self._tried = 0
        self.before_release: BeforeRelease = release_at_once
        self._expired_told: dict[EntryId, float] = {}
        """When the application was last told of a stream whose owner died."""
        self._expired_pages: dict[str, Page] = {}
        self._renewals = 0
        self._look_at_consumers_at = 0.0

    # --- being a member ---

    async def join(self) -> None:
        """From the start of the stream: what was announced before the first member came is handed out too."""
        await self.broker.create_group(self.stream, self.group, start="0")

    async def beat(self) -> None:
        """Says that this member is alive, and learns who else is."""
        asked_at = time.monotonic()
        self.view = await self._beat(self.settings.lease_ms)
        # Judged by when the answer came: a beat that was sent in time may have waited on its way past the lease.
        if time.monotonic() > self._alive_until:
            self.run += 1
        self._alive_until = max(self._alive_until, asked_at + self.settings.lease_ms / 1000)

    def certain_until(self, token: Token) -> float:
        """Until then (monotonic seconds) nobody else can have taken the stream; 0 where it is not certain now."""
        lease = self.owned.get(token.stream)
        if lease is None or lease.token != token or lease.run != self.run:
            return 0.0
        return self._alive_until

    async def _beat(self, lease_ms: int) -> View:
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
        await self._beat(0)
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
        records, locks = await self._read([lease.stream for lease in leases], [lease.lbs_id for lease in leases], True)
        vanished: list[Lease] = []
        unlocked: list[Lease] = []
        doubtful: list[Lease] = []
        for lease, record, lock in zip(leases, records, locks, strict=True):
            if self.owned.get(lease.stream) is not lease:
                continue  # finished or released while the answer was on its way
            if isinstance(record, MillstreamError) or isinstance(lock, MillstreamError):
                self._unanswered(lease.stream, record if isinstance(record, MillstreamError) else lock)
                continue  # nobody takes it while this member beats: ask again in the next round
            if record != lease.token.record():
                self._disown(lease)
                if record is None:
                    vanished.append(lease)
            elif lease.run != self.run:
                doubtful.append(lease)
            elif self.settings.go_locks and lock is None:
                unlocked.append(lease)
            elif self.settings.go_locks and lock is not None and to_name(lock) != self.name:
                await self.broker.run(lease_steps.release_lease, lease.stream, lease.token.record())
                self._disown(lease)
        if unlocked:
            await self._lock(unlocked)
        if vanished:
            await self._announce_again(vanished)
        if doubtful:
            await self._take_again(doubtful)
        self._renewals += 1
        if self._renewals % TOUCH_EVERY == 0:
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
            lease_steps.take_leases, self.name, [(one.stream, one.token.record()) for one in leases]
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
                self.owned[lease.stream] = Lease(token, lease.lbs_id, lease.info, run)
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
            lease.lbs_id = lbs_id

    async def _make_group_again(self) -> None:
        log.warning("the group %r of %r has vanished; making it again", self.group, self.stream)
        await self.join()

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
            [one.announcement.stream for one in candidates], [one.lbs_id for one in candidates], False
        )
        free: list[tuple[Candidate, bytes | None]] = []
        for candidate, record, lock in zip(candidates, records, locks, strict=True):
            if isinstance(record, MillstreamError) or isinstance(lock, MillstreamError):
                error = record if isinstance(record, MillstreamError) else lock
                self._unanswered(candidate.announcement.stream, error)
            elif is_free(record, lock, self.name, alive):
                free.append((candidate, record))
        return free

    async def _park(self, ids: Sequence[EntryId]) -> set[EntryId]:
        if not ids:
            return set()
        return set(await self.broker.xclaim_ids(self.stream, self.group, NOBODY, ids, min_idle_ms=0))

    async def _win(self, free: Sequence[tuple[Candidate, bytes | None]]) -> list[tuple[Candidate, Lease]]:
        if not free:
            return []
        began = time.perf_counter()
        run = self.run  # before the answer: a lease that a late answer tells of is no surer than the beat before it
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
                won.append((candidate, Lease(token, candidate.lbs_id, candidate.announcement.info, run), record))
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

    def _lock_keys(self, stream: str, lbs_id: EntryId) -> list[bytes]:
        """Under which names Go members look for the lock of a stream: one for each kind of release in the fleet."""
        if not self.settings.go_locks:
            return []
        return [lock_key(stream, lbs_id, separator) for separator in self.settings.go_lock_separators]

    async def _lock(self, leases: Sequence[Lease]) -> list[str]:
        """Takes the Go client's locks; gives back, and names, the streams that a Go member holds."""
        keys = [self._lock_keys(lease.stream, lease.lbs_id) for lease in leases]
        flat = [key for each in keys for key in each]
        granted = iter(await self.broker.run(lease_steps.lock_keys, flat, self.name, ttl_ms=self.settings.lease_ms))
        refused: list[Lease] = []
        for lease, each in zip(leases, keys, strict=True):
            answers = [next(granted) for _ in each]
            trouble = next((one for one in answers if isinstance(one, MillstreamError)), None)
            if trouble is not None:
                self._unanswered(lease.stream, trouble)
                if self.owned.get(lease.stream) is lease:
                    continue  # the next renewal asks again
            if not all(one is True for one in answers):
                refused.append(lease)
        await self._unlock(refused)
        released = await self.broker.run(
            lease_steps.release_leases, [(lease.stream, lease.token.record()) for lease in refused]
        )
        for lease, gone in zip(refused, released, strict=True):
            if isinstance(gone, MillstreamError):
                self._unanswered(lease.stream, gone)
            if self.owned.get(lease.stream) is lease:
                self._disown(lease)
        return [lease.stream for lease in refused]

    async def _unlock(self, leases: Sequence[Lease]) -> None:
        keys = [key for lease in leases for key in self._lock_keys(lease.stream, lease.lbs_id)]
        if keys:
            await self.broker.run(lease_steps.unlock_keys, keys, self.name)

    async def _give_back(self, leases: Sequence[Lease]) -> None:
        await self.before_release([lease.stream for lease in leases])
        for lease in leases:
            self.owned.pop(lease.stream, None)
        # The records first: they decide. Then the entries go to nobody, where the others' sweeps find them.
        released = await self.broker.run(
            lease_steps.release_leases, [(lease.stream, lease.token.record()) for lease in leases]
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
        records, _ = await self._read([lease.stream for lease in others], [lease.lbs_id for lease in others], False)
        unknown = [lease for lease in mine if lease.lbs_id not in parked]
        unknown += [lease for lease, record in zip(others, records, strict=True) if record is None]
        await self._announce_again(unknown)

    async def _read(
        self, streams: Sequence[str], ids: Sequence[EntryId], renew: bool
    ) -> tuple[list[bytes | MillstreamError | None], list[bytes | MillstreamError | None]]:
        """Owner records, and of each stream's locks the one that counts: somebody else's, or none, or this member's.

        With ``renew``, their times to live start anew in the same round trip.
        """
        keys = [self._lock_keys(stream, lbs_id) for stream, lbs_id in zip(streams, ids, strict=True)]
        records, values = await self.broker.run(
            lease_steps.read_leases,
            streams,
            [key for each in keys for key in each],
            lock_ttl_ms=self.settings.lease_ms if renew else None,
        )
        answers = iter(values)
        return records, [lock_that_counts([next(answers) for _ in each], self.name) for each in keys]

    async def _read_one(self, stream: str, lbs_id: EntryId) -> tuple[bytes | None, bytes | None]:
        [record], [lock] = await self._read([stream], [lbs_id], False)
        if isinstance(record, MillstreamError):
            raise record
        if isinstance(lock, MillstreamError):
            raise lock
        return record, lock

    # --- what the application asks for ---

    async def claim(self, stream: str, lbs_id: EntryId) -> StreamAdded:
        """Takes one stream over now, whatever this member's share is; StreamIsOwned while a living member holds it."""
        if stream in self.owned:
            raise StreamIsOwned(stream, self.name)
        await self.beat()
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
        if not await self.broker.run(lease_steps.finish_announcement, self.stream, self.group, self.name, lease.lbs_id):
            # A failover may have lost the last claim; the record still says that the entry is this member's.
            await self._hold([lease.lbs_id])
            await self.broker.run(lease_steps.finish_announcement, self.stream, self.group, self.name, lease.lbs_id)
        self.owned.pop(stream, None)
        await self.broker.run(lease_steps.release_lease, stream, lease.token.record())
        await self._unlock([lease])
        self._emit(StreamTerminated(stream, lease.lbs_id, lease.info, lease.token))
        self._tell("assignment.finished", stream=stream)

    async def release(self, stream: str) -> None:
        """Gives one stream back, unfinished: another member takes it."""
        lease = self._lease(stream)
        await self._give_back([lease])
        self._emit(StreamDisowned(stream, lease.lbs_id, lease.info, lease.token))

    async def _still_mine(self, lease: Lease) -> bool:
        record, _ = await self._read_one(lease.stream, lease.lbs_id)
        return record == lease.token.record()

    def _lease(self, stream: str) -> Lease:
        if stream not in self.owned:
            raise NotTheOwner(stream)
        return self.owned[stream]
