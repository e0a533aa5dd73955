"""Each middleware, with a manual clock."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from millstream.errors import InvalidArgument
from millstream.messaging.errors import (
    CircuitOpen,
    HandlerCancelled,
    HandlerCrashed,
    HandlerTimedOut,
    InjectedFailure,
    Rejected,
    RetryLater,
)
from millstream.messaging.handler import Handler, RunningHandler, running
from millstream.messaging.message import Message
from millstream.messaging.middleware import (
    Circuit,
    RateLimit,
    circuit_breaker,
    correlated,
    correlation,
    deduplicate,
    duplicate,
    fail_randomly,
    metrics,
    poison_queue,
    recoverer,
    retry,
    throttle,
    timeout,
)
from millstream.messaging.outcome import AckPolicy, Retry, after_error
from millstream.model import EntryId


class Time:
    """Sleeping moves the clock and takes no time."""

    def __init__(self) -> None:
        self.at = 100.0
        self.slept: list[float] = []

    def now(self) -> float:
        return self.at

    async def sleep(self, duration: float) -> None:
        self.slept.append(duration)
        self.at += duration
        await asyncio.sleep(0)


class Origin:
    def __init__(self, topic: str = "orders", group: str | None = "billing") -> None:
        self.topic = topic
        self.group = group
        self.consumer: str | None = "worker-1"

    def settle(self, message: Message, outcome: object) -> None:
        pass


def received(payload: bytes = b"body", *, at: int = 1, uuid: str = "u1", **origin: Any) -> Message:
    message = Message(payload, {}, uuid)
    message.receive(Origin(**origin), EntryId(at), 1, {})
    return message


def failing(times: int, error: Callable[[], Exception] = lambda: OSError("down")) -> tuple[Handler, list[Message]]:
    calls: list[Message] = []

    async def handler(message: Message) -> None:
        calls.append(message)
        if len(calls) <= times:
            raise error()

    return handler, calls


# --- retry ----------------------------------------------------------------------------------------------------------


async def test_retry_calls_again_with_growing_pauses_until_it_works() -> None:
    time = Time()
    handler, calls = failing(3)
    await retry(
        5,
        initial_interval_ms=1_000,
        multiplier=3,
        max_interval_ms=5_000,
        sleep=time.sleep,
        now=time.now,
        chance=lambda: 0.5,
    )(handler)(Message(b""))
    assert len(calls) == 4
    assert time.slept == [1, 3, 5]


async def test_retry_raises_the_last_error_when_it_has_tried_enough() -> None:
    time = Time()
    handler, calls = failing(99)
    with pytest.raises(OSError, match="down"):
        await retry(2, sleep=time.sleep, now=time.now)(handler)(Message(b""))
    assert len(calls) == 3


async def test_retry_stops_before_the_elapsed_time_is_exceeded() -> None:
    time = Time()
    handler, calls = failing(99)
    middleware = retry(
        100, initial_interval_ms=1_000, multiplier=1, max_elapsed_time_ms=3_500, sleep=time.sleep, now=time.now,
        chance=lambda: 0.5,
    )  # fmt: skip
    with pytest.raises(OSError, match="down"):
        await middleware(handler)(Message(b""))
    assert len(calls) == 4


async def test_retry_dead_letters_a_permanent_error_and_keeps_its_cause() -> None:
    handler, calls = failing(99, lambda: KeyError("customer"))
    with pytest.raises(Rejected, match="KeyError") as caught:
        await retry(5, permanent=(LookupError,))(handler)(Message(b""))
    assert isinstance(caught.value.__cause__, KeyError)
    assert len(calls) == 1


@pytest.mark.parametrize("error", [Rejected("no"), RetryLater(delay_ms=5)])
async def test_retry_passes_rejected_and_retry_later_on(error: Exception) -> None:
    handler, calls = failing(99, lambda: error)
    with pytest.raises(type(error)):
        await retry(5)(handler)(Message(b""))
    assert len(calls) == 1


async def test_retry_does_not_repeat_a_handler_that_settled_its_message() -> None:
    calls: list[Message] = []

    async def handler(message: Message) -> None:
        calls.append(message)
        await message.ack()
        raise OSError("after the acknowledgement")

    with pytest.raises(OSError, match="after"):
        await retry(5)(handler)(received())
    assert len(calls) == 1


@pytest.mark.parametrize(
    "options",
    [{"max_retries": -1}, {"multiplier": 0.5}, {"randomization_factor": 2}, {"initial_interval_ms": -1},
     {"max_interval_ms": 1.5}],
)  # fmt: skip
def test_retry_refuses_invalid_options(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(options))):
        retry(**options)


# --- timeout --------------------------------------------------------------------------------------------------------


async def test_timeout_cancels_a_slow_handler() -> None:
    cancelled = asyncio.Event()

    async def handler(message: Message) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(HandlerTimedOut):
        await timeout(limit_ms=10)(handler)(Message(b""))
    assert cancelled.is_set()


async def test_timeout_error_of_the_handler_is_not_mistaken_for_the_middleware_timeout() -> None:
    async def handler(message: Message) -> None:
        raise TimeoutError("the database's")

    with pytest.raises(TimeoutError, match="the database's"):
        await timeout(limit_ms=10_000)(handler)(Message(b""))


# --- throttle -------------------------------------------------------------------------------------------------------


def test_a_rate_limit_is_even_and_idle_time_allows_a_burst() -> None:
    even = RateLimit(0.1, 1)
    assert [round(even.reserve(0.0), 6) for _ in range(4)] == [0.0, 0.1, 0.2, 0.3]
    bursty = RateLimit(0.1, 3)
    assert [round(bursty.reserve(0.0), 6) for _ in range(5)] == [0.0, 0.0, 0.0, 0.1, 0.2]
    assert bursty.reserve(100.0) == 0.0


async def test_throttle_counts_over_all_handlers_that_it_wraps() -> None:
    time = Time()
    handler, calls = failing(0)
    limited = throttle(10, per_ms=1_000, sleep=time.sleep, now=time.now)
    first, two = limited(handler), limited(handler)
    for _ in range(10):
        await first(Message(b""))
        await two(Message(b""))
    assert len(calls) == 20
    assert round(time.at - 100, 6) == 1.9


# --- deduplicate ----------------------------------------------------------------------------------------------------


class Keys:
    """SET NX PX and GET, on a clock."""

    def __init__(self, time: Time) -> None:
        self.time = time
        self.held: dict[bytes, tuple[bytes, float]] = {}

    async def get(self, key: bytes) -> bytes | None:
        value, until = self.held.get(key, (None, 0.0))
        return value if until > self.time.at else None

    async def set(self, key: bytes, value: bytes, *, px: int | None = None, nx: bool = False) -> bool:
        if nx and await self.get(key) is not None:
            return False
        assert px is not None
        self.held[key] = (value, self.time.at + px / 1000)
        return True


@pytest.fixture(params=["in-process", "shared"])
def deduplicated(request: pytest.FixtureRequest) -> Callable[[Handler, Time], Handler]:
    def make(handler: Handler, time: Time) -> Handler:
        shared = Keys(time) if request.param == "shared" else None
        return deduplicate(window_ms=60_000, shared=shared, now=time.now)(handler)

    return make


async def test_a_second_entry_with_the_same_uuid_is_passed_over(deduplicated: Any) -> None:
    handler, calls = failing(0)
    wrapped = deduplicated(handler, Time())
    for at in (1, 2, 3):
        await wrapped(received(at=at))
    assert [message.id for message in calls] == [EntryId(1)]


async def test_a_redelivery_is_no_duplicate(deduplicated: Any) -> None:
    handler, calls = failing(1)
    wrapped = deduplicated(handler, Time())
    with pytest.raises(OSError, match="down"):
        await wrapped(received(at=1))
    await wrapped(received(at=1))
    assert len(calls) == 2


async def test_the_window_ends(deduplicated: Any) -> None:
    handler, calls = failing(0)
    time = Time()
    wrapped = deduplicated(handler, time)
    await wrapped(received(at=1))
    time.at += 61
    await wrapped(received(at=2))
    assert len(calls) == 2


async def test_every_group_handles_every_message_once(deduplicated: Any) -> None:
    handler, calls = failing(0)
    wrapped = deduplicated(handler, Time())
    for group in ("billing", "audit"):
        for at in (1, 2):
            await wrapped(received(at=at, group=group))
    assert [message.group for message in calls] == ["billing", "audit"]


async def test_in_process_deduplication_is_bounded() -> None:
    handler, calls = failing(0)
    wrapped = deduplicate(window_ms=60_000, max_keys=2)(handler)
    for number in (1, 2, 3, 1):
        await wrapped(received(at=number + 10 * len(calls), uuid=str(number)))
    assert len(calls) == 4  # the first was forgotten


# --- poison queue ---------------------------------------------------------------------------------------------------


class Published:
    def __init__(self) -> None:
        self.messages: list[tuple[str, Message]] = []

    async def publish(self, topic: str, *messages: Message) -> None:
        self.messages += [(topic, message) for message in messages]


async def test_the_poison_queue_gets_the_message_with_its_reason() -> None:
    published = Published()
    handler, _ = failing(99)
    with running(RunningHandler("charge", "orders", "billing", "worker-1")):
        assert await poison_queue(published, "poison")(handler)(received(b"\x00")) is None
    ((topic, message),) = published.messages
    assert (topic, message.payload, message.uuid) == ("poison", b"\x00", "u1")
    assert message.metadata == {
        "reason_poisoned": "down",
        "topic_poisoned": "orders",
        "handler_poisoned": "charge",
        "subscriber_poisoned": "billing",
    }


async def test_an_error_that_does_not_poison_passes() -> None:
    published = Published()
    handler, _ = failing(99)
    with pytest.raises(OSError, match="down"):
        await poison_queue(published, "poison", poisons=lambda error: False)(handler)(received())
    assert published.messages == []


async def test_requested_retry_is_not_sent_to_the_poison_queue() -> None:
    published = Published()
    handler, _ = failing(1, lambda: CircuitOpen(2))
    with pytest.raises(CircuitOpen):
        await poison_queue(published, "poison")(handler)(received())
    assert published.messages == []


def test_a_poison_queue_needs_a_topic() -> None:
    with pytest.raises(InvalidArgument, match=r"poison_queue\.topic"):
        poison_queue(Published(), "")


# --- correlation ----------------------------------------------------------------------------------------------------


async def test_outputs_carry_the_correlation_id_and_the_trace() -> None:
    by_itself: list[Message] = []

    async def handler(message: Message) -> list[Message]:
        by_itself.append(correlated(Message(b"published in the handler")))
        return [Message(b"1"), Message(b"2", {"correlation_id": "own"})]

    incoming = Message(b"", {"traceparent": "00-a-b-01", "tenant": "x"}, "first")
    outputs = await correlation()(handler)(incoming)
    assert isinstance(outputs, list)
    assert [message.metadata["correlation_id"] for message in outputs] == ["first", "own"]
    assert all(message.metadata["traceparent"] == "00-a-b-01" for message in [*outputs, *by_itself])
    assert by_itself[0].metadata["correlation_id"] == "first"
    assert "tenant" not in outputs[0].metadata
    assert correlated(Message(b"")).metadata == {}  # outside of a handler there is nothing to carry


# --- circuit breaker ------------------------------------------------------------------------------------------------


async def test_open_circuit_delays_messages_and_one_trial_closes_it() -> None:
    time = Time()
    handler, calls = failing(3)
    wrapped = circuit_breaker(3, reset_after_ms=30_000, sleep=time.sleep, now=time.now)(handler)
    for _ in range(3):
        with pytest.raises(OSError, match="down"):
            await wrapped(Message(b""))
    await wrapped(Message(b"waits"))
    assert time.slept == [30]
    await wrapped(Message(b"passes at once"))
    assert time.slept == [30]
    assert len(calls) == 5


async def test_only_one_trial_at_a_time_and_the_others_wait_for_its_end() -> None:
    time = Time()
    in_trial, release = asyncio.Event(), asyncio.Event()
    started: list[bytes] = []
    down = True

    async def handler(message: Message) -> None:
        started.append(message.payload)
        if down:
            raise OSError("down")
        in_trial.set()
        await release.wait()

    wrapped = circuit_breaker(1, reset_after_ms=30_000, sleep=time.sleep, now=time.now)(handler)
    with pytest.raises(OSError, match="down"):
        await wrapped(Message(b"0"))
    down = False
    tasks = [asyncio.create_task(wrapped(Message(b"%d" % n))) for n in (1, 2, 3)]  # type: ignore[arg-type]
    await in_trial.wait()
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(started) == 2
    release.set()
    await asyncio.gather(*tasks)
    assert len(started) == 4


async def test_a_bad_message_does_not_open_the_circuit() -> None:
    handler, calls = failing(99, lambda: Rejected("a bad message"))
    wrapped = circuit_breaker(2, reset_after_ms=30_000, when_open="raise")(handler)
    for _ in range(5):
        with pytest.raises(Rejected):
            await wrapped(Message(b""))
    assert len(calls) == 5


async def test_a_circuit_may_refuse_instead() -> None:
    time = Time()
    handler, calls = failing(99)
    wrapped = circuit_breaker(1, reset_after_ms=30_000, when_open="raise", now=time.now)(handler)
    with pytest.raises(OSError, match="down"):
        await wrapped(Message(b""))
    with pytest.raises(CircuitOpen) as caught:
        await wrapped(Message(b""))
    assert caught.value.retry_after_s == 30
    assert after_error(AckPolicy.REJECT_ON_ERROR, caught.value) == Retry(30_000, caught.value, charged=False)
    assert len(calls) == 1


def test_a_failed_trial_opens_the_circuit_again_and_a_cancelled_one_leaves_it_to_the_next() -> None:
    circuit = Circuit(1, 30)
    circuit.failed(0)
    assert circuit.enter(10) == 20
    assert circuit.enter(30) == 0
    assert circuit.enter(30) > 0
    circuit.failed(30)
    assert circuit.enter(31) == 29
    assert circuit.enter(60) == 0
    circuit.cancelled(61)
    assert circuit.enter(61) == 0


# --- recoverer ------------------------------------------------------------------------------------------------------


async def test_recoverer_turns_an_exit_into_an_error() -> None:
    async def handler(message: Message) -> None:
        sys.exit(3)

    with pytest.raises(HandlerCrashed, match="SystemExit"):
        await recoverer()(handler)(Message(b""))


async def test_recoverer_distinguishes_an_inner_cancellation_from_its_own() -> None:
    async def stray(message: Message) -> None:
        raise asyncio.CancelledError

    with pytest.raises(HandlerCancelled):
        await recoverer()(stray)(Message(b""))

    async def waits(message: Message) -> None:
        await asyncio.Event().wait()

    waiting: Awaitable[Any] = recoverer()(waits)(Message(b""))
    task = asyncio.ensure_future(waiting)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# --- metrics, duplicate, fail randomly ------------------------------------------------------------------------------


async def test_metrics_count_the_outcome_of_each_handler() -> None:
    time = Time()
    events: list[tuple[str, dict[str, Any]]] = []

    async def handler(message: Message) -> Message:
        time.at += 2
        if message.payload == b"bad":
            raise OSError("secret text")
        return Message(b"")

    wrapped = metrics(lambda name, /, **values: events.append((name, values)), now=time.now)(handler)
    with running(RunningHandler("charge", "orders", "billing", None)):
        await wrapped(Message(b"good"))
        with pytest.raises(OSError, match="secret"):
            await wrapped(Message(b"bad"))
    labels = {"handler": "charge", "topic": "orders", "group": "billing", "seconds": 2}
    assert events == [
        ("messaging.handled", {**labels, "outputs": 1, "error": ""}),
        ("messaging.handled", {**labels, "outputs": 0, "error": "OSError"}),
    ]


async def test_duplicate_calls_twice_with_messages_of_their_own() -> None:
    previous: list[Message] = []

    async def handler(message: Message) -> Message:
        previous.append(message)
        message.metadata["changed"] = "yes"
        return Message(b"out")

    incoming = Message(b"", {}, "u1")
    outputs = await duplicate()(handler)(incoming)
    assert isinstance(outputs, list)
    assert len(outputs) == 2
    assert [message.uuid for message in previous] == ["u1", "u1"]
    assert previous[0] is not previous[1]


@pytest.mark.parametrize("after", [False, True])
async def test_random_failures_repeat_with_their_seed(after: bool) -> None:
    async def outcomes(seed: int) -> tuple[list[bool], int]:
        handler, calls = failing(0)
        wrapped = fail_randomly(0.5, seed=seed, after=after)(handler)
        failed = []
        for _ in range(50):
            try:
                await wrapped(Message(b""))
                failed.append(False)
            except InjectedFailure:
                failed.append(True)
        return failed, len(calls)

    failed, calls = await outcomes(7)
    assert 5 < sum(failed) < 45
    assert await outcomes(7) == (failed, calls)
    assert (await outcomes(8))[0] != failed
    assert calls == (50 if after else 50 - sum(failed))
