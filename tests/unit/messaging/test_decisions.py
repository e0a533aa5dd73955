"""What a subscriber decides: who may start, what is read next, where a lost group begins again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from millstream.errors import InvalidArgument
from millstream.messaging import Ack, Backoff, Message, SubscriberSettings
from millstream.messaging.settings import check_topic, default_consumer
from millstream.messaging.subscriber.book import TRUST_AFTER, Book, ids_by_count
from millstream.messaging.subscriber.membership import restart_point
from millstream.messaging.subscriber.room import Room
from millstream.model import MIN_ID, EntryId


class Nowhere:
    topic, group, consumer = "t", "g", "c"

    def settle(self, message: Message, outcome: object) -> None:
        raise AssertionError("nobody settles here")


def message(number: int, times: int = 1, key: str | None = None, size: int = 1) -> Message:
    metadata = {} if key is None else {"key": key}
    return Message(b"x" * size, metadata).receive(Nowhere(), EntryId(number), times)


def settings(**options: object) -> SubscriberSettings:
    return SubscriberSettings(**{"group": "g", "consumer": "c", "group_start": "0", **options})  # type: ignore[arg-type]


# --- the book -----------------------------------------------------------------------------------------------------


def test_room_is_bounded_by_entries_and_by_bytes() -> None:
    book = Book(3, 100)
    assert book.room() == 3
    book.enter(message(1, size=60))
    assert (book.room(), book.room_bytes()) == (2, 40)
    book.enter(message(2, size=60))
    assert (book.room(), book.room_bytes()) == (0, 0)
    book.release([EntryId(1), EntryId(7)])
    assert (book.room(), book.room_bytes()) == (2, 40)


def test_an_empty_book_has_room_for_one_of_any_size() -> None:
    book = Book(3, 1)
    assert book.room() == 3
    book.enter(message(1, size=1000))
    assert book.room() == 0


def test_all_books_of_a_process_share_its_room() -> None:
    room = Room(10, 1000)
    one, other = Book(8, 900, room_of_all=room), Book(8, 900, room_of_all=room)
    for number in range(4):
        one.enter(message(number + 1, size=10))
        other.enter(message(number + 1, size=20))
    assert (room.messages, room.weight, room.free(), room.free_bytes()) == (8, 120, 2, 880)
    room.reserved = 2
    assert room.free() == 0
    other.forget_unstarted()
    one.release([EntryId(1)])
    assert (room.messages, room.weight) == (3, 30)
    room.weight = 1000
    assert room.free() == 0


def test_the_oldest_is_the_smallest_id_not_the_first_received() -> None:
    book = Book(9, 100)
    for number in (5, 3, 8):
        book.enter(message(number))
    assert book.oldest() == EntryId(3)
    assert Book(1, 1).oldest() is None


def test_what_is_certain_again_starts_before_what_came_later() -> None:
    book = Book(9, 100)
    some = [message(number) for number in (1, 2, 3)]
    for one in some:
        book.enter(one)
    book.doubtful = [book.ready.popleft(), book.ready.popleft()]
    book.trust(10.0, [EntryId(1), EntryId(2)])
    book.reconsider(5.0)
    assert (list(book.ready), book.doubtful) == (some, [])


def test_what_stays_doubtful_is_not_started() -> None:
    book = Book(9, 100)
    one, other = message(1), message(2)
    for each in (one, other):
        book.enter(each)
    book.ready.clear()
    book.doubtful = [one, other]
    book.trust(10.0, [EntryId(2)])
    book.reconsider(5.0)
    assert (list(book.ready), book.doubtful) == ([other], [one])


def test_what_others_took_is_not_started_and_what_was_started_stays_until_it_ends() -> None:
    book = Book(9, 100)
    for number in (1, 2, 3):
        book.enter(message(number))
    started = book.ready.popleft()
    assert started.id == EntryId(1)
    assert book.give_up({EntryId(1), EntryId(3)}) == {EntryId(3)}
    assert (list(book.entries), book.lost) == ([EntryId(1), EntryId(2)], {EntryId(1)})
    assert book.adopt(EntryId(1), 4, 9.0)
    assert (book.lost, started.times_delivered) == (set(), 4)
    assert not book.adopt(EntryId(3), 4, 9.0)


@pytest.mark.parametrize("way", ["given up", "held too long"])
def test_what_waited_behind_those_that_leave_moves_up_in_its_order(way: str) -> None:
    book = Book(99, 100, key_of=lambda one: one.key)
    for number in range(40):
        book.enter(message(number + 1, key=f"{number % 20}"))
    first = {EntryId(number + 1) for number in range(20)}
    if way == "given up":
        assert book.give_up(first) == first
    else:
        behind = [book.entries.pop(EntryId(number + 1)) for number in range(20, 40)]
        book.expire(0.0, 10.0)
        book.entries.update((one.id, one) for one in behind if one.id is not None)
        assert {one.id for one, _ in book.expire(10.0, 10.0)} == first
    assert [one.id for one in book.ready] == [EntryId(number + 1) for number in range(20, 40)]


def test_what_is_held_too_long_is_let_go_and_stays_until_its_handler_ends() -> None:
    book = Book(2, 100)
    for number in (1, 2):
        book.enter(message(number, times=3))
    started = book.ready.popleft()
    assert book.expire(0.0, 10.0) == [], "a sign of life has just found them"
    assert {(one.id, leaving) for one, leaving in book.expire(10.0, 10.0)} == {(EntryId(1), 3), (EntryId(2), 2)}
    assert (list(book.entries), list(book.ready), book.by_count()) == ([EntryId(1)], [], {})
    assert not book.stuck
    book.enter(message(4, times=1))
    taken = book.ready.popleft()
    book.expire(20.0, 10.0)
    assert book.expire(30.0, 10.0) == [(taken, 1)]
    assert book.stuck, "full of messages that nobody settles"
    book.release([EntryId(1)])
    assert not book.stuck
    started.times_delivered = 4
    book.once_more(taken, 1)
    assert book.by_count() == {1: [EntryId(4)]}, "a new start is a new hold"


def test_what_has_its_outcome_is_not_let_go_while_the_broker_is_away() -> None:
    book = Book(2, 100)
    one = message(1)
    book.enter(one)
    one.mark_settled(Ack())
    book.expire(0.0, 10.0)
    assert book.expire(100.0, 10.0) == []


@pytest.mark.parametrize("first", range(1, 20))
def test_a_key_that_others_took_whole_starts_nothing_here(first: int) -> None:
    """Whichever of them leaves the book first."""
    book = Book(9, 100, key_of=lambda one: one.key)
    numbers = (first, first + 3, first + 6)
    for number in numbers:
        book.enter(message(number, key="a"))
    book.give_up({EntryId(number) for number in numbers})
    assert (list(book.ready), book.entries) == ([], {})


def test_an_entry_whose_key_cannot_be_told_changes_nothing() -> None:
    def refuses(_: Message) -> str:
        raise ValueError("no key")

    book = Book(9, 100, key_of=refuses)
    with pytest.raises(ValueError, match="no key"):
        book.enter(message(1))
    assert (book.entries, book.weight, list(book.ready)) == ({}, 0, [])


def test_ids_by_count() -> None:
    assert ids_by_count([message(1), message(2, 3), message(3)]) == {1: [EntryId(1), EntryId(3)], 3: [EntryId(2)]}


# --- probation ----------------------------------------------------------------------------------------------------


def ids(messages: list[Message]) -> list[int]:
    return [one.id.ms for one in messages if one.id is not None]


def suspects(*some: Message, max_entries: int = 100) -> Book:
    book = Book(max_entries, 1000)
    for one in some:
        book.enter(one, suspect=True)
    return book


def test_one_at_a_time_and_the_fewest_starts_first() -> None:
    book = suspects(message(1, 4), message(3, 1), message(2, 1))
    assert [ids(some) for some in book.next_suspects()] == [[2], []]
    assert book.next_suspects() == ([], [])
    book.release([EntryId(9)])
    assert book.next_suspects() == ([], [])
    book.release([EntryId(2)])
    assert ids(book.next_suspects()[0]) == [3]


def test_a_suspect_that_is_said_to_be_done_before_it_starts_waits_no_more() -> None:
    """An acknowledgement of an earlier start came through late. Left in its queue, it met itself when it came anew."""
    book = suspects(message(1), message(2))
    assert ids(book.next_suspects()[0]) == [1]
    book.release(one.id for one in [message(2)] if one.id is not None)
    assert (book.unstarted(), book.probation_room()) == ([], book.probation_limit - 1)
    book.enter(message(2), suspect=True)
    assert ids(book.unstarted()) == [2]
    book.release(one.id for one in [message(1)] if one.id is not None)
    assert ids(book.next_suspects()[0]) == [2]


def test_who_had_too_many_starts_gets_no_other() -> None:
    book = suspects(message(1, 5), message(2, 4))
    assert [ids(some) for some in book.next_suspects()] == [[2], []]
    book.release([EntryId(2)])
    assert [ids(some) for some in book.next_suspects()] == [[], [1]]


def test_probation_counts_its_room() -> None:
    book = suspects(message(1), message(2), max_entries=4)
    assert book.probation_room() == 0
    book.next_suspects()
    assert book.probation_room() == 0
    book.release([EntryId(1)])
    assert book.probation_room() == 1
    assert ids(book.forget_unstarted()) == [2]
    assert (book.probation_room(), book.next_suspects(), book.unstarted()) == (2, ([], []), [])


def test_an_entry_that_was_withdrawn_may_come_again() -> None:
    book = suspects(message(1))
    book.forget_unstarted()
    book.enter(message(1), suspect=True)
    assert ids(book.next_suspects()[0]) == [1]
    assert book.next_suspects() == ([], [])


def test_what_was_charged_and_is_forgotten_before_its_start_keeps_no_other_waiting() -> None:
    book = suspects(message(1))
    [charged], _ = book.next_suspects()
    book.once_more(charged, 0)
    assert ids(book.forget_unstarted()) == [1]
    book.enter(message(2), suspect=True)
    assert ids(book.next_suspects()[0]) == [2]


def test_what_was_lost_after_its_count_had_seemed_to_be_keeps_no_other_waiting() -> None:
    book = suspects(message(1), message(2))
    [charged], _ = book.next_suspects()
    book.give_up({EntryId(1)})  # its count rose, and the answer was lost: a sign of life with the old one is refused
    book.once_more(charged, 0)
    book.doubt(book.ready.popleft())
    assert book.give_up({EntryId(1)} - book.lost) == {EntryId(1)}
    assert ids(book.next_suspects()[0]) == [2]


def test_a_process_that_outlived_many_suspects_takes_more_at_a_time_but_those_near_their_end_alone() -> None:
    book = suspects(*(message(n) for n in range(1, 301)), *(message(n, 3) for n in range(301, 304)), max_entries=1000)
    most = 0
    under_way: list[int] = []
    order: list[int] = []
    while True:
        starts, exhausted = book.next_suspects()
        assert not exhausted
        under_way += ids(starts)
        if not under_way:
            break
        order += ids(starts)
        most = max(most, len(under_way))
        if len(order) <= TRUST_AFTER:
            assert len(under_way) == 1, "nobody knows yet whether one of them kills"
        if any(number > 300 for number in under_way):
            assert len(under_way) == 1, "one more start beside a killer might be its last but one"
        book.release([EntryId(under_way.pop(0))])
    assert order == list(range(1, 304))
    assert most > 8


# --- against a naive model ----------------------------------------------------------------------------------------


class NaiveBook:
    """Lists, and nothing remembered that could be worked out: what the book shall answer, however slowly."""

    def __init__(self) -> None:
        self.held: list[tuple[int, int, str | None, bool]] = []
        """Number, starts, key, suspect: in the order in which they came."""
        self.ready: list[int] = []
        self.doubtful: list[int] = []
        self.started: set[int] = set()
        """By a worker, or charged before that."""
        self.lost: set[int] = set()
        self.trial: int | None = None
        self.looked_at: dict[int, int] = {}
        """When a sign of life first found each of them."""
        self.let_go: set[int] = set()

    def enter(self, number: int, times: int, key: str | None, suspect: bool) -> None:
        first = key is None or all(other != key for _, _, other, _ in self.held)
        self.held.append((number, times, key, suspect))
        if first and not suspect:
            self.ready.append(number)

    def on_trial(self) -> list[tuple[int, int]]:
        """Suspects that stand first in their key, and have not started, the fewest starts first."""
        found = []
        for at, (number, times, key, suspect) in enumerate(self.held):
            behind = key is not None and any(other == key for _, _, other, _ in self.held[:at])
            if suspect and not behind and number not in self.started:
                found.append((times, number))
        return sorted(found)

    def next_suspect(self) -> int | None:
        waiting = self.on_trial()
        if self.trial is not None or not waiting:
            return None
        self.trial = waiting[0][1]
        self.started.add(self.trial)
        return self.trial

    def counted(self, number: int) -> None:
        """The start of a suspect was charged: now it waits for a worker like any other, and is certainly ours."""
        self.held = [(one, times, key, suspect and one != number) for one, times, key, suspect in self.held]
        self.started.discard(number)
        self.lost.discard(number)
        self.let_go.discard(number)
        self.looked_at.pop(number, None)
        self.ready.append(number)

    def release(self, numbers: set[int]) -> None:
        for number in sorted(numbers):
            at = next((at for at, one in enumerate(self.held) if one[0] == number), None)
            if at is None:
                continue
            key = self.held[at][2]
            was_first = key is None or all(other != key for _, _, other, _ in self.held[:at])
            del self.held[at]
            follower = next((one for one in self.held if one[2] == key), None) if key is not None else None
            if was_first and follower is not None and not follower[3]:
                self.ready.append(follower[0])
        self.ready = [number for number in self.ready if number not in numbers]
        self.doubtful = [number for number in self.doubtful if number not in numbers]
        self.started -= numbers
        self.lost -= numbers
        self.let_go -= numbers
        self.looked_at = {number: at for number, at in self.looked_at.items() if number not in numbers}
        if self.trial in numbers:
            self.trial = None

    def look(self, now: int, longest: int) -> dict[int, int]:
        """Those held for too long, and the count with which each is given back. What nobody started leaves."""
        for number, *_ in self.held:
            self.looked_at.setdefault(number, now)
        late = [one for one in self.held if now - self.looked_at[one[0]] >= longest and one[0] not in self.let_go]
        leaving = {
            number: times if number in self.started or suspect else times - 1 for number, times, _, suspect in late
        }
        unstarted = set(leaving) - self.started
        self.let_go |= set(leaving) - unstarted
        self.release(unstarted)
        return leaving


@hypothesis_settings(max_examples=300)
@given(
    st.lists(st.tuples(st.integers(0, 13), st.integers(0, 99), st.integers(1, 5)), min_size=40, max_size=120),
    st.booleans(),
)
def test_the_book_answers_as_a_naive_one(steps: list[tuple[int, int, int]], in_order: bool) -> None:
    room = Room(1 << 30, 1 << 30)
    book = Book(1000, 1 << 30, key_of=(lambda one: one.key) if in_order else None, room_of_all=room)
    naive = NaiveBook()
    charged: set[int] = set()
    """Suspects whose start is being counted: no worker has had them."""
    number = now = 0
    for what, which, times in steps:
        if what <= 4:  # comes in: two keys and none, every third one abandoned
            number += 1
            key = [None, "a", "b"][which % 3]
            suspect = which % 4 == 0
            book.enter(message(number, times, key=key), suspect=suspect)
            naive.enter(number, times, key if in_order else None, suspect)
        elif what == 5 and book.ready:  # a worker takes the next
            taken = book.ready.popleft()
            assert taken.id is not None
            assert taken.id.ms == naive.ready.pop(0)
            naive.started.add(taken.id.ms)
        elif what == 6:  # probation
            starts, exhausted = book.next_suspects()
            found = [*starts, *exhausted]
            expected = naive.next_suspect()
            if expected is not None:
                charged.add(expected)
            assert ids(found) == ([] if expected is None else [expected])
            assert bool(exhausted) == (bool(found) and found[0].times_delivered >= 5)
        elif what == 7 and naive.started:  # somebody was settled
            done = sorted(naive.started)[which % len(naive.started)]
            book.release([EntryId(done)])
            naive.release({done})
        elif what == 8 and naive.held:  # others took some
            gone = {one[0] for one in naive.held if one[0] * which % 3 == 0}
            unstarted = gone - naive.started
            assert {one.ms for one in book.give_up({EntryId(n) for n in gone})} == unstarted
            naive.lost |= gone - unstarted
            naive.release(unstarted)
        elif what == 9:  # the group was made again: all that nobody has seen comes anew
            forgotten = set(ids(book.forget_unstarted()))
            assert forgotten == {one[0] for one in naive.held} - naive.started
            naive.held = [one for one in naive.held if one[0] in naive.started]
            naive.looked_at = {number: at for number, at in naive.looked_at.items() if number in naive.started}
            naive.ready, naive.doubtful = [], []
            if naive.trial not in naive.started:
                naive.trial = None
        elif what == 10:  # a sign of life, some time later
            now += which
            found_late = book.expire(now, 100)
            assert {one.id.ms: left for one, left in found_late if one.id is not None} == naive.look(now, 100)
        elif what == 11 and naive.trial in naive.started and naive.trial in charged:  # its start was counted
            charged.discard(naive.trial)
            book.once_more(book.entries[EntryId(naive.trial)], 1)
            naive.counted(naive.trial)
        elif what == 12 and book.ready:  # a worker finds that the next may be another's by now
            doubted = book.ready.popleft()
            doubted.valid_until = -1.0
            book.doubt(doubted)
            naive.doubtful.append(naive.ready.pop(0))
        elif what == 13 and naive.doubtful:  # the broker was asked: some are ours
            certain = [one for one in naive.doubtful if one * which % 2 == 0]
            book.trust(1.0, [EntryId(one) for one in certain])
            book.reconsider(0.0)
            naive.ready[:0] = certain
            naive.doubtful = [one for one in naive.doubtful if one not in certain]
        assert [one.ms for one in book.entries] == [one[0] for one in naive.held]
        assert ids(list(book.ready)) == naive.ready
        assert ids(book.doubtful) == naive.doubtful
        assert {one.ms for one in book.lost} == naive.lost
        assert {one.ms for one in book.expired} == naive.let_go
        alive = {one.ms for some in book.by_count().values() for one in some}
        assert alive == {one[0] for one in naive.held} - naive.let_go
        assert (room.messages, room.weight, book.weight) == (len(naive.held),) * 3
        assert set(ids(book.unstarted())) == {one[0] for one in naive.held} - naive.started


# --- a lost group -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("oldest", "last", "generated", "point"),
    [
        (None, EntryId(9), EntryId(9), EntryId(9)),
        (None, EntryId(9), EntryId(20), EntryId(9)),
        (EntryId(5, 3), EntryId(9), EntryId(20), EntryId(5, 2)),
        (EntryId(5, 3), EntryId(9), EntryId(8), MIN_ID),
        (None, EntryId(9), MIN_ID, MIN_ID),
        (None, MIN_ID, MIN_ID, MIN_ID),
        (EntryId(12), EntryId(9), EntryId(20), EntryId(9)),
    ],
)
def test_where_a_lost_group_begins_again(
    oldest: EntryId | None, last: EntryId, generated: EntryId, point: EntryId
) -> None:
    assert restart_point(oldest, last, generated) == point


# --- settings ---------------------------------------------------------------------------------------------------------


def test_backoff_grows_within_bounds() -> None:
    backoff = Backoff(initial_ms=100, factor=2, max_ms=1000, jitter=0.5)
    assert [backoff.delay_ms(n, 0.5) for n in (1, 2, 3, 4, 5, 5000)] == [100, 200, 400, 800, 1000, 1000]
    assert (backoff.delay_ms(1, 0.0), backoff.delay_ms(1, 1.0)) == (50, 150)


def test_reads_come_back_before_anybody_claims() -> None:
    assert settings(claim_min_idle_ms=300).read_block_ms == 100
    assert settings().read_block_ms == 5_000
    with pytest.raises(InvalidArgument, match=r"block_ms.*at most 100.*claim_min_idle_ms"):
        settings(block_ms=101, claim_min_idle_ms=300)


def test_a_block_time_that_is_given_is_the_one_that_is_used() -> None:
    assert settings(block_ms=20_000, claim_interval_ms=50).read_block_ms == 20_000
    assert settings(block_ms=100, claim_min_idle_ms=300).read_block_ms == 100


def test_the_longest_hold() -> None:
    assert settings(claim_min_idle_ms=3000).heartbeat_ms == 1000


@pytest.mark.parametrize(
    ("name", "value"),
    [("group_start", None), ("group_start", "now"), ("count", 0), ("max_deliveries", 0), ("dlq", ""), ("consumer", "")],
)
def test_what_settings_may_not_be(name: str, value: object) -> None:
    with pytest.raises(InvalidArgument, match=name):
        settings(**{name: value})


def test_without_a_group_no_start_is_asked_for() -> None:
    assert settings(group=None, group_start=None).group is None


def test_a_consumer_is_named_after_host_and_process() -> None:
    import os

    assert default_consumer().endswith(f"-{os.getpid()}")
    with pytest.raises(InvalidArgument, match="topic"):
        check_topic("")
