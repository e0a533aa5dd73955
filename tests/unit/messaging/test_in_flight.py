"""The in-flight table: capacity, order per key, isolation, ownership; and the transition for every state and event."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest

from millstream.messaging import Ack, Message, Retry
from millstream.messaging.consumer.capacity import ProcessCapacity
from millstream.messaging.consumer.in_flight import (
    TRANSITIONS,
    Event,
    IllegalTransition,
    InFlight,
    State,
    all_transitions,
    ids_by_count,
)
from millstream.model import EntryId


class Nowhere:
    topic, group, consumer = "t", "g", "c"

    def settle(self, message: Message, outcome: object) -> None:
        raise AssertionError("the table settles nothing")


def message(number: int, times: int = 1, key: str | None = None, size: int = 1) -> Message:
    metadata = {} if key is None else {"key": key}
    return Message(b"x" * size, metadata).receive(Nowhere(), EntryId(number), times, {}, 10.0)


def table(*messages: Message, claimed: bool = False, max_entries: int = 100, **options: object) -> InFlight:
    made = InFlight(max_entries, 1000, **options)  # type: ignore[arg-type]
    for item in messages:
        made.add(item, claimed=claimed)
    return made


def by_key(first: Message) -> str | None:
    return first.key


def numbers(messages: Iterable[Message]) -> list[int]:
    return [item.id.ms for item in messages if item.id is not None]


def ready(in_flight: InFlight) -> list[int]:
    return numbers(in_flight._ready)


def take(in_flight: InFlight, now: float = 0.0) -> Message:
    taken = in_flight.take(now)
    assert taken is not None
    return taken


def ids(*items: int) -> list[EntryId]:
    return [EntryId(number) for number in items]


def returned(pairs: Iterable[tuple[Message, int]]) -> dict[int, int]:
    """By number, the delivery counts with which entries are returned to the group."""
    return {pair.id.ms: count for pair, count in pairs if pair.id is not None}


# --- capacity -------------------------------------------------------------------------------------------------------


def test_capacity_is_limited_by_entries_and_by_bytes() -> None:
    in_flight = InFlight(3, 100)
    assert in_flight.capacity() == 3
    in_flight.add(message(1, size=60))
    assert (in_flight.capacity(), in_flight.capacity_bytes()) == (2, 40)
    in_flight.add(message(2, size=60))
    assert (in_flight.capacity(), in_flight.capacity_bytes()) == (0, 0)
    in_flight.release(ids(1, 7))
    assert (in_flight.capacity(), in_flight.capacity_bytes()) == (2, 40)


def test_an_empty_table_has_capacity_for_one_message_of_any_size() -> None:
    in_flight = InFlight(3, 1)
    assert in_flight.capacity() == 3
    in_flight.add(message(1, size=1000))
    assert in_flight.capacity() == 0


def test_all_tables_of_a_process_share_its_capacity() -> None:
    process = ProcessCapacity(10, 1000)
    first, other = InFlight(8, 900, process=process), InFlight(8, 900, process=process)
    for number in range(4):
        first.add(message(number + 1, size=10))
        other.add(message(number + 1, size=20))
    assert (process.messages, process.weight, process.free(), process.free_bytes()) == (8, 120, 2, 880)
    process.reserved = 2
    assert process.free() == 0
    other.return_unstarted()
    first.release(ids(1))
    assert (process.messages, process.weight) == (3, 30)
    process.weight = 1000
    assert process.free() == 0


def test_outputs_use_capacity_until_their_message_is_released() -> None:
    in_flight = table(message(1), message(2))
    in_flight.add_outputs(EntryId(1), 998)
    in_flight.add_outputs(EntryId(9), 998)
    assert (in_flight.outputs_bytes, in_flight.capacity(), in_flight.outputs_full) == (998, 0, False)
    in_flight.release(ids(1))
    assert (in_flight.outputs_bytes, in_flight.capacity()) == (0, 99)


def test_the_oldest_entry_has_the_smallest_id() -> None:
    assert table(message(5), message(3), message(8)).oldest() == EntryId(3)
    assert table().oldest() is None


def test_ids_by_count() -> None:
    assert ids_by_count([message(1), message(2, 3), message(3)]) == {1: ids(1, 3), 3: ids(2)}


# --- ownership ------------------------------------------------------------------------------------------------------


def test_entries_that_are_verified_start_before_later_ones() -> None:
    in_flight = table(message(1), message(2), message(3))
    for item in in_flight.messages()[:2]:
        item.valid_until = 1.0
    assert take(in_flight, now=5.0).id == EntryId(3)
    in_flight.add(message(4))
    in_flight.confirm(10.0, ids(1, 2, 77))
    in_flight.requeue_verified(5.0)
    assert (ready(in_flight), in_flight.unverified) == ([1, 2, 4], 0)


def test_an_entry_that_stays_unverified_is_not_started() -> None:
    in_flight = table(message(1), message(2))
    assert in_flight.take(11.0) is None
    in_flight.confirm(20.0, ids(2))
    in_flight.requeue_verified(11.0)
    assert (ready(in_flight), in_flight.in_state(State.UNVERIFIED)) == ([2], ids(1))


def test_a_lost_entry_is_not_started_and_a_running_one_stays_until_its_handler_ends() -> None:
    in_flight = table(message(1), message(2), message(3))
    running = take(in_flight)
    assert in_flight.mark_lost(ids(1, 3, 9)) == ids(3)
    assert (in_flight.ids(), in_flight.in_state(State.LOST)) == (ids(1, 2), ids(1))
    assert in_flight.heartbeat_ids() == {1: ids(2)}
    assert in_flight.refresh_delivery(EntryId(1), 4, 19.0)
    assert (in_flight.in_state(State.LOST), running.times_delivered) == ([], 4)
    assert not in_flight.refresh_delivery(EntryId(3), 4, 19.0)


def test_a_reply_that_is_older_than_what_is_known_changes_nothing() -> None:
    in_flight = table(message(1, 3))
    assert in_flight.refresh_delivery(EntryId(1), 2, 9.0)
    assert in_flight.messages()[0].times_delivered == 3
    assert in_flight.refresh_delivery(EntryId(1), 1, 11.0), "the group was created again: the count begins at 1"
    assert in_flight.messages()[0].times_delivered == 1


def test_a_retry_of_a_lost_entry_is_left_to_its_new_owner() -> None:
    in_flight = table(message(1, key="a"), message(2, key="a"), key_of=by_key)
    running = take(in_flight)
    in_flight.mark_lost(ids(1))
    assert in_flight.settle(running)
    assert not in_flight.delay(running, counted=True)
    assert (in_flight.ids(), ready(in_flight)) == (ids(2), [2])


def test_outcome_of_a_released_message_is_dropped() -> None:
    in_flight = table(message(1))
    running = take(in_flight)
    in_flight.release(ids(1))
    assert not in_flight.settle(running)


# --- order per key --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", range(1, 20))
def test_a_key_whose_entries_are_all_lost_starts_nothing(first: int) -> None:
    """Whichever of them is released first."""
    batch = (first, first + 3, first + 6)
    in_flight = table(*(message(number, key="a") for number in batch), key_of=by_key)
    in_flight.mark_lost(ids(*batch))
    assert (ready(in_flight), len(in_flight)) == ([], 0)


@pytest.mark.parametrize("way", ["lost", "expired"])
def test_entries_behind_those_that_leave_become_ready_in_their_order(way: str) -> None:
    in_flight = table(*(message(number + 1, key=f"{number % 20}") for number in range(20)), key_of=by_key)
    in_flight.expire(1.0, 10.0)
    for number in range(20, 40):
        in_flight.add(message(number + 1, key=f"{number % 20}"))
    first = ids(*range(1, 21))
    if way == "lost":
        assert in_flight.mark_lost(first) == first
    else:
        assert sorted(returned(in_flight.expire(11.0, 10.0))) == list(range(1, 21))
    assert ready(in_flight) == list(range(21, 41))


def test_a_retry_starts_before_later_messages_of_its_key() -> None:
    in_flight = table(message(1, key="a"), message(2, key="a"), message(3, key="b"), key_of=by_key)
    running = take(in_flight)
    in_flight.settle(running)
    assert in_flight.delay(running, counted=True)
    assert ready(in_flight) == [3]
    assert in_flight.delay_over(running)
    fresh = message(1, 2, key="a")
    assert in_flight.requeue(running, fresh)
    assert ready(in_flight) == [3, 1]
    take(in_flight), in_flight.settle(take(in_flight))
    in_flight.release(ids(1))
    assert ready(in_flight) == [2]


def test_a_message_whose_key_cannot_be_computed_changes_nothing() -> None:
    def fails(_: Message) -> str:
        raise ValueError("no key")

    in_flight = InFlight(9, 100, key_of=fails)
    with pytest.raises(ValueError, match="no key"):
        in_flight.add(message(1))
    assert (len(in_flight), in_flight.weight, ready(in_flight)) == (0, 0, [])


# --- the longest hold -----------------------------------------------------------------------------------------------


def test_an_expired_entry_is_returned_and_stays_until_its_handler_ends() -> None:
    in_flight = table(message(1, 3), message(2, 3), max_entries=2)
    running = take(in_flight)
    assert in_flight.expire(5.0, 10.0) == [], "a heartbeat has just found them"
    assert returned(in_flight.expire(15.0, 10.0)) == {1: 3, 2: 2}, "the start that did not happen is not counted"
    assert (in_flight.ids(), ready(in_flight), in_flight.heartbeat_ids()) == (ids(1), [], {})
    assert not in_flight.stuck
    in_flight.add(message(4))
    taken = take(in_flight)
    in_flight.expire(20.0, 10.0)
    assert in_flight.expire(30.0, 10.0) == [(taken, 1)]
    assert in_flight.stuck, "full of messages that no handler settles"
    in_flight.settle(running)
    assert not in_flight.stuck


def test_a_message_with_an_outcome_does_not_expire_while_the_broker_is_away() -> None:
    in_flight = table(message(1))
    in_flight.settle(take(in_flight))
    in_flight.expire(5.0, 10.0)
    assert in_flight.expire(100.0, 10.0) == []


# --- entries claimed from a dead consumer ---------------------------------------------------------------------------


def test_claimed_entries_are_counted_before_they_start() -> None:
    in_flight = table(message(1), message(2), claimed=True)
    assert ready(in_flight) == []
    assert [numbers(batch) for batch in in_flight.next_to_count()] == [[1, 2], []]
    assert in_flight.next_to_count() == ([], [])
    assert returned(in_flight.return_counts()) == {1: 1, 2: 1}, "their start is not counted yet"
    (counted,) = (item for item in in_flight.messages() if item.id == EntryId(2))
    counted.times_delivered = 2
    in_flight.requeue(counted, counted)
    assert (ready(in_flight), returned(in_flight.return_counts())) == ([2], {1: 1, 2: 1})


def test_entries_that_were_redelivered_before_a_crash_run_one_at_a_time_and_the_lowest_count_first() -> None:
    in_flight = table(message(1, 4), message(3, 2), message(2, 2), claimed=True)
    assert numbers(in_flight.next_to_count()[0]) == [2]
    assert in_flight.next_to_count() == ([], [])
    in_flight.release(ids(9))
    assert in_flight.next_to_count() == ([], [])
    assert in_flight.release(ids(2))
    assert numbers(in_flight.next_to_count()[0]) == [3]


@pytest.mark.parametrize(("max_deliveries", "alone"), [(1, True), (2, True), (3, False), (5, False)])
def test_an_entry_that_could_not_survive_another_crash_is_isolated_at_once(max_deliveries: int, alone: bool) -> None:
    in_flight = table(message(1), message(2), claimed=True, max_deliveries=max_deliveries)
    assert len(in_flight.in_state(State.ISOLATED)) == (2 if alone else 0)


def test_an_entry_with_too_many_deliveries_is_not_started_again() -> None:
    in_flight = table(message(1, 5), message(2, 4), claimed=True)
    assert [numbers(batch) for batch in in_flight.next_to_count()] == [[2], []]
    in_flight.release(ids(2))
    assert [numbers(batch) for batch in in_flight.next_to_count()] == [[], [1]]
    assert in_flight.next_to_count() == ([], []), "isolated until it is dead-lettered"


def test_claimed_entries_take_half_of_the_capacity() -> None:
    in_flight = table(message(1), message(2, 2), claimed=True, max_entries=4)
    assert in_flight.claim_capacity() == 0
    in_flight.next_to_count()
    assert in_flight.claim_capacity() == 0
    in_flight.release(ids(1))
    assert in_flight.claim_capacity() == 1
    assert in_flight.return_unstarted() == [], "the other one is being counted"
    in_flight.release(ids(2))
    assert (in_flight.claim_capacity(), in_flight.next_to_count()) == (2, ([], []))


def test_an_isolated_entry_that_is_released_before_it_starts_waits_no_more() -> None:
    """The acknowledgement of an earlier start was confirmed late."""
    in_flight = table(message(1, 2), message(2, 2), claimed=True)
    assert numbers(in_flight.next_to_count()[0]) == [1]
    in_flight.release(ids(2))
    in_flight.add(message(2, 2), claimed=True)
    in_flight.release(ids(1))
    assert numbers(in_flight.next_to_count()[0]) == [2]
    assert in_flight.next_to_count() == ([], [])


@pytest.mark.parametrize("way", ["returned", "lost"])
def test_an_isolated_entry_that_was_counted_and_leaves_before_its_start_blocks_no_other(way: str) -> None:
    in_flight = table(message(1, 2), message(2, 2), claimed=True)
    [counted], _ = in_flight.next_to_count()
    in_flight.mark_lost(ids(1))  # the count has risen, and a heartbeat with the old one was refused
    assert in_flight.requeue(counted, counted)
    if way == "returned":
        assert sorted(returned(in_flight.return_unstarted())) == [1, 2]
        in_flight.add(message(2, 2), claimed=True)
    else:
        assert in_flight.mark_lost(ids(1)) == ids(1)
    assert numbers(in_flight.next_to_count()[0]) == [2]


def test_a_count_whose_entry_was_delivered_again_meanwhile_refreshes_that_delivery() -> None:
    in_flight = table(message(1, 2), claimed=True)
    [counting], _ = in_flight.next_to_count()
    in_flight.release(ids(1))
    in_flight.add(message(1, 2))
    fresh = message(1, 3)
    fresh.valid_until = 20.0
    assert not in_flight.requeue(counting, fresh)
    assert (ready(in_flight), in_flight.heartbeat_ids(), len(in_flight)) == ([1], {3: ids(1)}, 1)


# --- bad input ------------------------------------------------------------------------------------------------------


def test_replies_for_entries_that_are_not_in_flight_change_nothing() -> None:
    in_flight = table(message(1))
    in_flight.release(ids(7, 7))
    in_flight.confirm(99.0, ids(7))
    in_flight.mark_lost(ids(7))
    in_flight.add_outputs(EntryId(7), 5)
    assert not in_flight.refresh_delivery(EntryId(7), 1, 9.0)
    assert in_flight.can_be_lost(ids(7), 1) == set()
    assert (in_flight.ids(), in_flight.weight, in_flight.outputs_bytes) == (ids(1), 1, 0)


def test_an_id_twice_in_one_release_is_released_once() -> None:
    in_flight = table(message(1), message(2))
    in_flight.release(ids(1, 1))
    assert (len(in_flight), in_flight.weight, in_flight.process.messages) == (1, 1, 1)


# --- every state and every event ------------------------------------------------------------------------------------


def in_state(state: State, in_flight: InFlight) -> Message:
    """An entry of the table in this state, brought there by the public methods."""
    first = message(1, 2 if state is State.ISOLATED else 1, key="a")
    if state in (State.KEY_QUEUED, State.KEY_QUEUED_CLAIMED):
        in_flight.add(message(7, key="a"))
        in_flight.add(first, claimed=state is State.KEY_QUEUED_CLAIMED)
    elif state is State.RECEIVED:
        in_flight.add_unhandled(first)
    elif state in (State.CLAIMED, State.ISOLATED, State.COUNTING):
        in_flight.add(first, claimed=True)
        if state is State.COUNTING:
            in_flight.next_to_count()
    else:
        in_flight.add(first)
        if state is State.UNVERIFIED:
            in_flight.take(11.0)
        elif state is not State.READY:
            in_flight.take(0.0)
        if state in (State.LOST, State.SETTLING_LOST):
            in_flight.mark_lost(ids(1))
        elif state is State.EXPIRED:
            in_flight.expire(1.0, 10.0), in_flight.expire(11.0, 10.0)
        if state in (State.SETTLING, State.SETTLING_LOST, State.DELAYED):
            in_flight.settle(first)
        if state is State.DELAYED:
            in_flight.delay(first, counted=True)
        if state is State.RELEASED:
            in_flight.release(ids(1))
    assert first._state is state
    return first


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)), ids=lambda item: item.name)
def test_every_event_is_in_the_table_or_rejected(state: State, event: Event) -> None:
    """Rejected: it raises in tests. In production it is reported, and the entry leaves the table and every index."""
    strict = InFlight(9, 100, key_of=by_key)
    reported: list[IllegalTransition] = []
    tolerant = InFlight(9, 100, key_of=by_key, on_illegal=reported.append)
    if event in TRANSITIONS[state]:
        assert strict._move(in_state(state, strict), event) is TRANSITIONS[state][event]
        return
    with pytest.raises(IllegalTransition) as raised:
        strict._move(in_state(state, strict), event)
    assert (raised.value.entry_id, raised.value.state, raised.value.event) == (EntryId(1), state, event)
    assert tolerant._move(in_state(state, tolerant), event) is None
    assert [(error.entry_id, error.state, error.event) for error in reported] == [(EntryId(1), state, event)]
    assert EntryId(1) not in tolerant
    assert 1 not in ready(tolerant)
    assert (tolerant.unverified, tolerant.next_to_count()) == (0, ([], []))
    assert tolerant.weight == tolerant.process.weight == len(tolerant)


def test_every_state_can_be_reached_and_left() -> None:
    reached, pending = {State.RECEIVED}, [State.RECEIVED]
    while pending:
        new = set(TRANSITIONS[pending.pop()].values()) - reached
        reached |= new
        pending += new
    assert reached == set(State)
    assert {state for state, _, new in all_transitions() if new is State.RELEASED} == set(State)


def test_an_outcome_for_a_message_that_waits_in_a_queue_is_rejected() -> None:
    in_flight = table(message(1))
    (waiting,) = in_flight.messages()
    with pytest.raises(IllegalTransition, match="entry 1-0 in state READY received event SETTLE"):
        in_flight.settle(waiting)


def test_a_message_that_is_added_twice_is_rejected() -> None:
    reported: list[IllegalTransition] = []
    in_flight = InFlight(9, 100, on_illegal=reported.append)
    first, other = message(1), message(2)
    in_flight.add_all({EntryId(1): first})
    assert in_flight.add_all({EntryId(1): first, EntryId(2): other}) == 1
    assert [error.event for error in reported] == [Event.ADD]
    assert (in_flight.ids(), ready(in_flight)) == (ids(2), [2])


def test_outcomes_are_those_of_the_message() -> None:
    """The table decides by state; ``has_unsettled`` is for messages that users settle by hand."""
    in_flight = table(message(1), message(2))
    for outcome in (Ack(), Retry(5)):
        assert not in_flight.has_unsettled(), "what has not started needs no outcome"
        running = take(in_flight)
        assert in_flight.has_unsettled()
        in_flight.settle(running)
        running.mark_settled(outcome)
    assert not in_flight.has_unsettled()
