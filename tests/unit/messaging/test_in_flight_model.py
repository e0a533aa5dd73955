"""Random events against a naive model of the in-flight table.

The model keeps plain lists, computes everything from them, and states for each event in its own words what happens to
an entry in each state. After every event the table must agree with it. A run prints its seed; SEED=... repeats it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest

from millstream.messaging import Message
from millstream.messaging.consumer.capacity import ProcessCapacity
from millstream.messaging.consumer.in_flight import Event, InFlight, State, all_transitions
from millstream.model import EntryId

MAX_ENTRIES, MAX_BYTES, MAX_DELIVERIES, MAX_HOLD = 16, 60, 5, 60.0
MAX_EXTRA = 30
"""The maximum number of walks, as a multiple of the requested one, until every transition has happened."""
KEYS = (None, None, "a", "b")
WAITING = {State.KEY_QUEUED, State.KEY_QUEUED_CLAIMED, State.READY, State.UNVERIFIED, State.CLAIMED, State.ISOLATED}
"""No handler of this process has started."""

Pairs = set[tuple[State, Event]]


class Nowhere:
    topic, group, consumer = "t", "g", "c"

    def settle(self, message: Message, outcome: object) -> None:
        raise AssertionError("the table settles nothing")


@dataclass
class Entry:
    number: int
    times: int
    key: str | None
    size: int
    valid: float
    claimed: bool
    state: State = State.RECEIVED
    seen_at: float | None = None
    counted: bool = True
    """Of a delayed retry: whether its next delivery is counted."""
    outputs: int = 0


class Model:
    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.ready: list[int] = []
        self.unverified: list[int] = []
        self.claimed_queue: list[int] = []
        self.isolated_queue: list[tuple[int, int]] = []
        self.isolated: int | None = None
        self.happened: Pairs = set()

    def find(self, number: int) -> Entry | None:
        return next((entry for entry in self.entries if entry.number == number), None)

    def go(self, entry: Entry, event: Event, new: State) -> None:
        self.happened.add((entry.state, event))
        entry.state = new

    # --- coming in

    def add(self, entry: Entry, *, claimed: bool) -> None:
        behind = entry.key is not None and any(item.key == entry.key for item in self.entries)
        self.entries.append(entry)
        if behind:
            self.go(
                entry,
                Event.QUEUE_CLAIMED if claimed else Event.QUEUE,
                State.KEY_QUEUED_CLAIMED if claimed else State.KEY_QUEUED,
            )
        else:
            self.enqueue(entry, claimed=claimed)

    def enqueue(self, entry: Entry, *, claimed: bool) -> None:
        if not claimed:
            self.go(entry, Event.ADD, State.READY)
            self.ready.append(entry.number)
        elif entry.times >= 2:
            self.go(entry, Event.ADD_ISOLATED, State.ISOLATED)
            self.isolated_queue.append((entry.times, entry.number))
        else:
            self.go(entry, Event.ADD_CLAIMED, State.CLAIMED)
            self.claimed_queue.append(entry.number)

    def refresh(self, number: int, times: int, valid: float) -> bool:
        entry = self.find(number)
        if entry is None:
            return False
        if times >= entry.times or valid >= entry.valid:
            entry.times, entry.valid = times, valid
            again = {State.LOST: State.RUNNING, State.SETTLING_LOST: State.SETTLING}
            self.go(entry, Event.DELIVER_AGAIN, again.get(entry.state, entry.state))
        return True

    # --- starting

    def take(self, now: float) -> int | None:
        while self.ready:
            number = self.ready.pop(0)
            entry = self.find(number)
            assert entry is not None
            if entry.valid >= now:
                self.go(entry, Event.TAKE, State.RUNNING)
                return number
            self.go(entry, Event.MARK_UNVERIFIED, State.UNVERIFIED)
            self.unverified.append(number)
        return None

    def verified(self, now: float) -> None:
        certain = [number for number in self.unverified if self.of(number).valid >= now]
        for number in reversed(certain):
            self.go(self.of(number), Event.VERIFY, State.READY)
        self.unverified = [number for number in self.unverified if number not in certain]
        self.ready[:0] = certain

    def of(self, number: int) -> Entry:
        entry = self.find(number)
        assert entry is not None
        return entry

    def next_to_count(self) -> tuple[list[int], list[int]]:
        candidates, self.claimed_queue = self.claimed_queue, []
        if self.isolated is None and self.isolated_queue:
            first = min(self.isolated_queue)
            self.isolated_queue.remove(first)
            self.isolated = first[1]
            candidates = [*candidates, first[1]]
        exhausted = [number for number in candidates if self.of(number).times >= MAX_DELIVERIES]
        to_count = [number for number in candidates if number not in exhausted]
        for number in to_count:
            self.go(self.of(number), Event.COUNT, State.COUNTING)
        return to_count, exhausted

    # --- leaving

    def settle(self, entry: Entry) -> None:
        self.go(entry, Event.SETTLE, State.SETTLING_LOST if entry.state is State.LOST else State.SETTLING)

    def leave(self, numbers: Iterable[int], event: Event, *, start_next: bool = True) -> None:
        leaving = [find for number in dict.fromkeys(numbers) if (find := self.find(number)) is not None]
        gone = {item.number for item in leaving}
        for entry in leaving:
            self.go(entry, event, State.RELEASED)
        self.ready = [number for number in self.ready if number not in gone]
        self.unverified = [number for number in self.unverified if number not in gone]
        self.claimed_queue = [number for number in self.claimed_queue if number not in gone]
        self.isolated_queue = [place for place in self.isolated_queue if place[1] not in gone]
        if self.isolated in gone:
            self.isolated = None
        for entry in leaving:
            at = self.entries.index(entry)
            before = any(item.key == entry.key for item in self.entries[:at])
            following = next((item for item in self.entries[at + 1 :] if item.key == entry.key), None)
            del self.entries[at]
            if entry.key is None or before or following is None or following.number in gone or not start_next:
                continue
            self.enqueue(following, claimed=following.state is State.KEY_QUEUED_CLAIMED)

    def mark_lost(self, numbers: Iterable[int]) -> list[int]:
        released = []
        for number in sorted(numbers):
            entry = self.find(number)
            if entry is None:
                continue
            if entry.state in WAITING or entry.state is State.DELAYED:
                released.append(number)
            else:
                self.go(entry, Event.MARK_LOST, State.LOST if entry.state is State.RUNNING else entry.state)
        self.leave(released, Event.MARK_LOST)
        return released

    def expire(self, now: float) -> dict[int, int]:
        late: dict[int, int] = {}
        released = []
        for entry in self.entries:
            if entry.seen_at is None:
                entry.seen_at = now
            waits, runs = entry.state in WAITING, entry.state in (State.RUNNING, State.LOST)
            if now - entry.seen_at < MAX_HOLD or not (waits or runs):
                continue
            late[entry.number] = self.return_count(entry)
            if waits:
                released.append(entry.number)
            else:
                self.go(entry, Event.EXPIRE, State.EXPIRED)
        self.leave(sorted(released), Event.EXPIRE)
        return late

    def return_unstarted(self) -> dict[int, int]:
        unstarted = {entry.number: self.return_count(entry) for entry in self.entries if entry.state in WAITING}
        self.leave(unstarted, Event.RETURN, start_next=False)
        return unstarted

    @staticmethod
    def return_count(entry: Entry) -> int:
        """Its delivery count, without a start that was counted and did not happen."""
        counted = {State.KEY_QUEUED, State.READY, State.UNVERIFIED}
        if entry.state in counted or (entry.state is State.DELAYED and not entry.counted):
            return max(0, entry.times - 1)
        return entry.times


class Walk:
    """One table and one model, and random events for both."""

    def __init__(self, seed: int, *, in_order: bool) -> None:
        self.chance = random.Random(seed)
        self.in_order = in_order
        self.process = ProcessCapacity(1 << 30, 1 << 30)
        key_of: Callable[[Message], str | None] | None = (lambda item: item.key) if in_order else None
        self.table = InFlight(
            MAX_ENTRIES, MAX_BYTES, max_deliveries=MAX_DELIVERIES, key_of=key_of, process=self.process
        )
        self.model = Model()
        self.now = 1.0
        self.next_number = 1
        self.released: list[Message] = []
        self.steps: list[Callable[[], None]] = [
            *[self.read] * 4,
            *[self.claim] * 3,
            self.receive_unreadable,
            *[self.take] * 8,
            *[self.settle] * 6,
            *[self.confirm_outcomes] * 4,
            self.settle_late,
            *[self.delay] * 2,
            *[self.delay_over] * 2,
            *[self.count] * 3,
            *[self.counted] * 4,
            *[self.lose] * 2,
            self.heartbeat_refused,
            *[self.expire] * 2,
            self.group_created_again,
            *[self.deliver_again] * 2,
            *[self.verify] * 2,
            self.add_outputs,
            self.late_reply,
        ]

    # --- what may happen

    def message_of(self, entry: Entry) -> Message:
        message = Message(b"x" * entry.size, {} if entry.key is None else {"key": entry.key})
        return message.receive(Nowhere(), EntryId(entry.number), entry.times, {}, entry.valid)

    def entry(self, *, claimed: bool = False) -> Entry:
        number, self.next_number = self.next_number, self.next_number + 1
        if self.released and self.chance.random() < 0.1:  # one that was here before, read or claimed again
            again = self.chance.choice(self.released).id
            if again is not None and self.model.find(again.ms) is None:
                number = again.ms
        key = self.chance.choice(KEYS) if self.in_order else None
        times = self.chance.choice((1, 1, 2, 3, 5)) if claimed else 1
        return Entry(number, times, key, self.chance.randrange(8), self.valid(), claimed)

    def valid(self) -> float:
        return self.now + self.chance.choice((-5, 20, 60))

    def some(self, *states: State) -> list[Entry]:
        return [entry for entry in self.model.entries if not states or entry.state in states]

    def any_of(self, *states: State) -> Entry | None:
        batch = self.some(*states)
        return self.chance.choice(batch) if batch else None

    def record(self, entry: Entry) -> Message:
        result = self.table.get(EntryId(entry.number))
        assert result is not None
        return result

    def read(self) -> None:
        if self.table.capacity() <= 0:
            return
        entries = [self.entry() for _ in range(self.chance.randrange(1, 4))]
        entries = list({entry.number: entry for entry in entries}.values())
        if self.in_order:
            for entry in entries:
                self.table.add(self.message_of(entry))
        else:
            size = self.table.add_all({EntryId(entry.number): self.message_of(entry) for entry in entries})
            assert size == sum(entry.size for entry in entries)
        for entry in entries:
            self.model.add(entry, claimed=False)

    def claim(self) -> None:
        if self.table.claim_capacity() > 0:
            entry = self.entry(claimed=True)
            self.table.add(self.message_of(entry), claimed=True)
            self.model.add(entry, claimed=True)

    def receive_unreadable(self) -> None:
        entry = self.entry()
        entry.key = None
        self.table.add_unhandled(self.message_of(entry))
        self.model.entries.append(entry)

    def take(self) -> None:
        taken = self.table.take(self.now)
        assert (None if taken is None or taken.id is None else taken.id.ms) == self.model.take(self.now)

    def settle(self) -> None:
        entry = self.any_of(State.RUNNING, State.LOST, State.EXPIRED, State.RECEIVED)
        if entry is not None:
            assert self.table.settle(self.record(entry))
            self.model.settle(entry)

    def settle_late(self) -> None:
        if self.released:
            self.model.happened.add((State.RELEASED, Event.SETTLE))
            assert not self.table.settle(self.chance.choice(self.released))

    def confirm_outcomes(self) -> None:
        settling = self.some(State.SETTLING, State.SETTLING_LOST)
        self.release([item.number for item in settling if self.chance.random() < 0.7])

    def late_reply(self) -> None:
        """The confirmation of an earlier delivery, for whatever is in flight now, or not."""
        numbers = [self.chance.randrange(1, self.next_number + 2) for _ in range(2)]
        self.release(numbers + numbers[:1])

    def release(self, numbers: list[int]) -> None:
        self.released += [get for number in numbers if (get := self.table.get(EntryId(number))) is not None]
        del self.released[:-5]
        may_count = self.table.release([EntryId(number) for number in numbers])
        self.model.leave(numbers, Event.RELEASE)
        waits = bool(self.model.isolated_queue) and self.model.isolated is None
        assert may_count == (bool(self.model.claimed_queue) or waits)

    def delay(self) -> None:
        entry = self.any_of(State.SETTLING, State.SETTLING_LOST)
        if entry is None:
            return
        counted = self.chance.random() < 0.5
        delayed = self.table.delay(self.record(entry), counted=counted)
        assert delayed == (entry.state is State.SETTLING)
        if delayed:
            self.model.go(entry, Event.DELAY, State.DELAYED)
            entry.counted = counted
        else:
            self.model.leave([entry.number], Event.DELAY)

    def delay_over(self) -> None:
        entry = self.any_of()
        if entry is None:
            return
        counted = self.table.delay_over(self.record(entry))
        if entry.state is not State.DELAYED:
            assert counted is None
            return
        assert counted is entry.counted
        if entry.counted:
            self.model.go(entry, Event.COUNT, State.COUNTING)
        else:
            self.requeue(entry, entry.times)

    def count(self) -> None:
        to_count, exhausted = self.table.next_to_count()
        expected = self.model.next_to_count()
        assert ([item.id.ms for item in to_count if item.id], [item.id.ms for item in exhausted if item.id]) == expected
        for item in exhausted:
            assert self.table.settle(item)
            self.model.settle(self.model.of(item.id.ms))  # type: ignore[union-attr]  # received: it has an id

    def counted(self) -> None:
        entry = self.any_of(State.COUNTING)
        if entry is None:
            return
        if self.chance.random() < 0.2:  # refused: another consumer has it
            self.release([entry.number])
        else:
            self.requeue(entry, entry.times + 1)

    def requeue(self, entry: Entry, times: int) -> None:
        message = self.record(entry)
        entry.times, entry.valid, entry.seen_at = times, self.valid(), None
        fresh = message
        if self.chance.random() < 0.5:
            fresh = self.message_of(entry)
        else:
            message.times_delivered, message.valid_until = times, entry.valid
        assert self.table.requeue(message, fresh)
        if fresh is not message:
            assert not self.table.requeue(message, self.message_of(entry)), "a reply for the earlier delivery"
            self.model.go(entry, Event.REQUEUE, State.READY)
            self.model.ready.append(entry.number)
            self.model.refresh(entry.number, entry.times, entry.valid)
        else:
            self.model.go(entry, Event.REQUEUE, State.READY)
            self.model.ready.append(entry.number)

    def lose(self) -> None:
        known = [item.number for item in self.some() if item.state is not State.RECEIVED]
        numbers = [number for number in known if self.chance.random() < 0.3] + [self.next_number + 5]
        released = self.table.mark_lost([EntryId(number) for number in numbers])
        assert [item.ms for item in released] == self.model.mark_lost(numbers)

    def heartbeat_refused(self) -> None:
        entry = self.any_of()
        if entry is None:
            return
        times = entry.times + self.chance.choice((0, 0, 1))
        lost = self.table.can_be_lost([EntryId(entry.number), EntryId(self.next_number + 5)], times)
        can = entry.state in WAITING or entry.state in (State.RUNNING, State.DELAYED)
        assert lost == ({EntryId(entry.number)} if can and times == entry.times else set())

    def expire(self) -> None:
        self.now += self.chance.randrange(40)
        late = self.table.expire(self.now, MAX_HOLD)
        assert {item.id.ms: count for item, count in late if item.id is not None} == self.model.expire(self.now)

    def group_created_again(self) -> None:
        if self.chance.random() < 0.3:
            dropped = self.table.return_unstarted()
            expected = self.model.return_unstarted()
            assert {item.id.ms: count for item, count in dropped if item.id is not None} == expected

    def deliver_again(self) -> None:
        entry = self.any_of()
        number = entry.number if entry is not None else self.next_number + 5
        times, valid = self.chance.choice((1, 2, 3, 6)), self.valid()
        known = self.table.refresh_delivery(EntryId(number), times, valid)
        assert known == self.model.refresh(number, times, valid)

    def verify(self) -> None:
        self.now += self.chance.randrange(10)
        confirmed = [item for item in self.some() if self.chance.random() < 0.5]
        self.table.confirm(self.now + 30, [EntryId(item.number) for item in confirmed])
        for item in confirmed:
            item.valid = self.now + 30
        self.table.requeue_verified(self.now)
        self.model.verified(self.now)

    def add_outputs(self) -> None:
        entry = self.any_of(State.RUNNING)
        if entry is not None and not entry.outputs:
            entry.outputs = self.chance.randrange(20)
            self.table.add_outputs(EntryId(entry.number), entry.outputs)

    # --- what must hold

    def run(self, steps: int) -> Pairs:
        for _ in range(steps):
            self.chance.choice(self.steps)()
            self.compare()
        return self.model.happened

    def compare(self) -> None:
        table, entries = self.table, self.model.entries
        records = table.messages()
        assert [(entry.id.ms, entry._state, entry.times_delivered) for entry in records if entry.id is not None] == [
            (entry.number, entry.state, entry.times) for entry in entries
        ]
        assert [item.id.ms for item in table._ready if item.id is not None] == self.model.ready
        assert [item.ms for item in table._unverified] == self.model.unverified
        size, outputs = sum(entry.size for entry in entries), sum(entry.outputs for entry in entries)
        assert (table.weight, table.outputs_bytes, self.process.weight) == (size, outputs, size)
        assert self.process.messages == len(entries)
        full = size + outputs >= MAX_BYTES
        assert table.capacity() == (0 if full else MAX_ENTRIES - len(entries))
        claimed = sum(entry.claimed for entry in entries)
        assert table.claim_capacity() == max(0, min(table.capacity(), MAX_ENTRIES // 2 - claimed))
        isolated = [entry.number for entry in entries if entry.number == self.model.isolated]
        assert len(isolated) <= 1
        returned = {
            return_count.id.ms: count for return_count, count in table.return_counts() if return_count.id is not None
        }
        assert returned == {entry.number: self.model.return_count(entry) for entry in entries}
        without = (State.LOST, State.EXPIRED, State.SETTLING_LOST)
        retained = {item.ms for batch in table.heartbeat_ids().values() for item in batch}
        assert retained == {entry.number for entry in entries if entry.state not in without}
        stuck = bool(entries) and table.capacity() <= 0 and all(entry.state is State.EXPIRED for entry in entries)
        assert table.stuck == stuck


def run(steps: int, walks: int) -> None:
    seed = int(os.environ.get("SEED", "0")) or random.randrange(10**9)
    print(f"SEED={seed}")
    happened: Pairs = set()
    expected = {(state, event) for state, event, _ in all_transitions()}
    for number in range(MAX_EXTRA * walks):
        happened |= Walk(seed + number, in_order=number % 2 == 0).run(steps // walks)
        if number + 1 >= walks and happened == expected:
            return  # some transitions are rare: a short run continues until each of them has occurred
    assert happened == expected, "every transition was exercised"


def test_the_table_agrees_with_a_naive_model_after_every_event() -> None:
    run(24_000, walks=8)


@pytest.mark.at_length
@pytest.mark.timeout(1800)
def test_the_table_agrees_with_a_naive_model_for_a_million_events() -> None:
    run(1_000_000, walks=200)
