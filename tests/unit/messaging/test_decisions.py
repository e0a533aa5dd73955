"""What a subscriber decides: who may start, what is read next, where a lost group begins again."""

from __future__ import annotations

import random

import pytest

from millstream.errors import InvalidArgument
from millstream.messaging import Backoff, Message, SubscriberSettings
from millstream.messaging.settings import check_topic, default_consumer
from millstream.messaging.subscriber.held import Held, ids_by_count
from millstream.messaging.subscriber.lanes import Lanes
from millstream.messaging.subscriber.pace import MAX_SCAN, REST_FACTOR, Pace, Step, restart_point
from millstream.messaging.subscriber.probation import Probation
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


# --- held -------------------------------------------------------------------------------------------------------------


def test_room_is_bounded_by_entries_and_by_bytes() -> None:
    held = Held(3, 100)
    assert held.room() == 3
    held.add(message(1, size=60))
    assert (held.room(), held.room_bytes()) == (2, 40)
    held.add(message(2, size=60))
    assert (held.room(), held.room_bytes()) == (0, 0)
    held.drop([EntryId(1), EntryId(7)])
    assert (held.room(), held.room_bytes()) == (2, 40)


def test_an_empty_book_has_room_for_one_of_any_size() -> None:
    held = Held(3, 1)
    assert held.room() == 3
    held.add(message(1, size=1000))
    assert held.room() == 0


def test_the_oldest_is_the_smallest_id_not_the_first_received() -> None:
    held = Held(9, 100)
    for number in (5, 3, 8):
        held.add(message(number))
    assert held.oldest() == EntryId(3)
    assert Held(1, 1).oldest() is None


def test_what_is_certain_again_starts_before_what_came_later() -> None:
    held = Held(9, 100)
    some = [message(number) for number in (1, 2, 3)]
    for one in some:
        held.add(one)
    held.doubtful = some[:2]
    held.ready.append(some[2])
    held.trust(10.0, [EntryId(1), EntryId(2)])
    held.reconsider(5.0)
    assert list(held.ready) == some
    assert held.doubtful == []


def test_what_stays_doubtful_is_not_started() -> None:
    held = Held(9, 100)
    one, other = message(1), message(2)
    for each in (one, other):
        held.add(each)
    held.doubtful = [one, other]
    held.trust(10.0, [EntryId(2)])
    held.reconsider(5.0)
    assert (list(held.ready), held.doubtful) == ([other], [one])


def test_withdrawn_entries_leave_every_queue() -> None:
    held = Held(9, 100)
    held.ready.extend(message(number) for number in (1, 2, 3))
    held.doubtful = [message(4), message(5)]
    held.withdraw({EntryId(2), EntryId(5)})
    assert [one.id for one in held.ready] == [EntryId(1), EntryId(3)]
    assert [one.id for one in held.doubtful] == [EntryId(4)]


def test_ids_by_count() -> None:
    assert ids_by_count([message(1), message(2, 3), message(3)]) == {1: [EntryId(1), EntryId(3)], 3: [EntryId(2)]}


# --- probation --------------------------------------------------------------------------------------------------------


def test_one_at_a_time_and_the_fewest_starts_first() -> None:
    probation = Probation(10)
    for one in (message(1, 4), message(3, 1), message(2, 1)):
        probation.add(one)
    first = probation.next()
    assert first is not None
    assert first.id == EntryId(2)
    assert probation.next() is None
    assert probation.passed(EntryId(9)) is False
    assert probation.next() is None
    assert probation.passed(EntryId(2)) is True
    assert [one.id for one in (probation.next(),) if one] == [EntryId(3)]


def test_probation_counts_its_room() -> None:
    probation = Probation(2)
    probation.add(message(1))
    probation.add(message(2))
    assert (len(probation), probation.room()) == (2, 0)
    probation.next()
    assert (len(probation), probation.room()) == (2, 0)
    probation.passed(EntryId(1))
    probation.withdraw({EntryId(2), EntryId(7)})
    assert (len(probation), probation.room(), probation.next(), probation.waiting()) == (0, 2, None, [])


def test_an_entry_that_was_withdrawn_may_come_again() -> None:
    probation = Probation(2)
    probation.add(message(1))
    probation.withdraw({EntryId(1)})
    probation.add(message(1, 2))
    again = probation.next()
    assert again is not None


# --- lanes ------------------------------------------------------------------------------------------------------------


def test_a_key_is_a_lane() -> None:
    lanes = Lanes(lambda one: one.key)
    assert lanes.enter(message(1, key="a"))
    assert not lanes.enter(message(2, key="a"))
    assert lanes.enter(message(3, key="b"))
    assert lanes.enter(message(4))
    assert [one.id for one in lanes.waiting()] == [EntryId(2)]
    following = lanes.leave(EntryId(1))
    assert following is not None
    assert following.id == EntryId(2)
    assert lanes.leave(EntryId(2)) is None
    assert lanes.leave(EntryId(4)) is None
    assert lanes.enter(message(5, key="a"))


def test_lanes_against_a_naive_model() -> None:
    seed = random.randrange(10**9)
    print("seed", seed)
    chance = random.Random(seed)
    lanes, model, under_way = Lanes(lambda one: one.key), {}, set()
    for number in range(1, 400):
        if under_way and chance.random() < 0.5:
            done = chance.choice(sorted(under_way))
            under_way.discard(done)
            key = next(key for key, queue in model.items() if queue and queue[0] == done)
            model[key].pop(0)
            following = lanes.leave(EntryId(done))
            assert (following.id.ms if following and following.id else None) == (model[key][0] if model[key] else None)
            if model[key]:
                under_way.add(model[key][0])
        key = chance.choice("abc")
        model.setdefault(key, []).append(number)
        first = lanes.enter(message(number, key=key))
        assert first == (len(model[key]) == 1)
        if first:
            under_way.add(number)


# --- pace -------------------------------------------------------------------------------------------------------------


def test_own_entries_then_the_abandoned_then_new_ones() -> None:
    pace = Pace(settings(claim_interval_ms=1000))
    assert pace.next_step(0, room=5, probation_room=5) is Step.OWN
    pace.own_page(b"(3-0", finished=False)
    assert pace.next_step(0, room=5, probation_room=5) is Step.OWN
    pace.own_page(b"0-0", finished=True)
    assert pace.next_step(0, room=5, probation_room=5) is Step.SWEEP
    pace.sweep_page(0, 2, b"0-0", True, took=0)
    assert pace.next_step(2, room=5, probation_room=5) is Step.READ
    assert pace.next_step(1002, room=5, probation_room=5) is Step.SWEEP


def test_a_full_book_waits_and_a_full_probation_reads() -> None:
    pace = Pace(settings())
    assert pace.next_step(0, room=0, probation_room=5) is Step.WAIT
    assert pace.next_step(0, room=5, probation_room=0) is Step.READ
    assert pace.read_block_ms(0) <= 20, "more is to be recovered as soon as there is room"


def test_under_constant_load_every_page_gets_its_turn() -> None:
    """There is always something new to read; the cursor moves all the same, and comes round."""
    pace = Pace(settings(claim_interval_ms=1000))
    pace.own_page(b"0-0", finished=True)
    now, pages, looked = 0.0, 7, []
    while len(looked) < pages:
        if pace.next_step(now, room=1, probation_room=1) is Step.SWEEP:
            looked.append(pace.sweep.cursor)
            pace.sweep_page(now, now + 1, b"%d-0" % len(looked), len(looked) == pages, took=0)
        now += 1
    assert looked == [b"0-0", *(b"%d-0" % n for n in range(1, pages))]
    assert pace.sweep.cursor == b"0-0"
    assert now <= pages * (REST_FACTOR + 2)


def test_a_page_that_found_something_is_followed_at_once() -> None:
    pace = Pace(settings())
    pace.own_page(b"0-0", finished=True)
    pace.sweep_page(0, 1, b"5-0", False, took=3)
    assert pace.next_step(1, room=1, probation_room=1) is Step.SWEEP
    assert pace.sweep.cursor == b"5-0"


def test_no_read_waits_past_the_next_page() -> None:
    pace = Pace(settings(block_ms=5000, claim_interval_ms=3000))
    pace.own_page(b"0-0", finished=True)
    pace.sweep_page(0, 0, b"0-0", True, took=0)
    assert pace.read_block_ms(0) == 3000
    assert pace.read_block_ms(1000) == 2000


def test_bytes_turn_into_a_count() -> None:
    pace = Pace(settings(count=50))
    assert pace.read_count(room=100, room_bytes=10**9) == 50
    assert pace.read_count(room=7, room_bytes=10**9) == 7
    for _ in range(50):
        pace.weigh(10, 10_000)
    assert pace.read_count(room=100, room_bytes=5_000) in (4, 5)
    assert pace.read_count(room=100, room_bytes=0) == 1
    assert pace.scan_size(1) == 100
    assert pace.scan_size(10_000) == MAX_SCAN


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
    assert settings(block_ms=5000, claim_min_idle_ms=300, claim_interval_ms=5000).read_block_ms == 100
    assert settings(claim_min_idle_ms=3000).beat_ms == 1000


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
