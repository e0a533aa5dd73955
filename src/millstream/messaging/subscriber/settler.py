"""Brings outcomes about, in batches: while one batch is on its way, the next one gathers, of all topics together.

In: outcomes, from handlers that never wait for it. Out: the broker's atomic steps, and then the entry leaves the book.
Nothing is said to be done before its handler is; nothing leaves the book before the broker confirmed it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from millstream.broker import Settled, settle, together, xadd_many
from millstream.errors import BrokerClosed, MillstreamError, NoSuchGroup, StaleOwner
from millstream.messaging.failure import Burial, bury_with, describe, text_of
from millstream.messaging.message import Message
from millstream.messaging.outcome import ACKED, Ack, Bury, Outcome, Retry, limit_deliveries
from millstream.messaging.partitions import outputs_by_stream
from millstream.messaging.subscriber.book import ids_by_count, messages_by_count
from millstream.messaging.subscriber.membership import lost, not_held, pending_here, restore
from millstream.messaging.subscriber.outputs import store_outputs
from millstream.messaging.subscriber.topic import Topic
from millstream.model import Backoff, EntryId

if TYPE_CHECKING:
    from millstream.messaging.subscriber.consumer import SharedConsumer

log = logging.getLogger(__name__)

Step = Callable[[Topic, Sequence[Message]], Awaitable[None]]

AGAIN = Backoff(initial_ms=50, max_ms=1_000, jitter=0.5)
"""Between tries while the broker cannot be reached."""
IN_ONE_GO = 500
"""Topics whose acknowledgements travel together."""


class Settler:
    def __init__(self, consumer: SharedConsumer) -> None:
        self._consumer = consumer
        self._wanted = asyncio.Event()
        self._dirty: dict[Topic, None] = {}
        """Topics with something to be brought about."""

    # --- what handlers and topics say -------------------------------------------------------------------------------

    def settle(self, topic: Topic, message: Message, outcome: Outcome) -> None:
        if isinstance(outcome, Ack) and not outcome.outputs:
            topic.outbox.acks.append(message)
        else:
            limited = limit_deliveries(outcome, message.times_delivered, topic.settings.max_deliveries)
            topic.outbox.others.append((message, limited))
        self.wake(topic)

    def charge(self, topic: Topic, messages: Iterable[Message]) -> None:
        """One more start of entries that were delivered before: counted first, then ready."""
        topic.outbox.charges += messages
        self.wake(topic)

    def wake(self, topic: Topic) -> None:
        self._dirty[topic] = None
        self._wanted.set()

    async def ack_now(self, topic: Topic, message: Message) -> bool:
        """For at most once: returns when the broker has it, False if the entry is not ours any more."""
        accepted = False

        async def step(topic: Topic, _: Sequence[Message]) -> None:
            nonlocal accepted
            assert message.id is not None
            answer = await topic.run(settle.ack_held, [message.id], times_delivered=message.times_delivered)
            accepted = not answer.refused
            topic.tell("messaging.acked", entries=int(accepted))
            self._consumer.release(topic, [message.id])

        message.mark_settled(ACKED)
        await self._insist(topic, step, [message])
        return accepted

    async def publish(self, topic: Topic, outputs: Sequence[Message]) -> None:
        """Outputs of a message that is acknowledged already."""
        assert topic.publish_to is not None
        for stream, some in outputs_by_stream(topic.publish_to, outputs).items():
            stored = await topic.broker.run(xadd_many, stream, [topic.codec.encode(one) for one in some])
            topic.tell_outputs(stream, len(stored))

    # --- the loop ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            dirty, self._dirty = self._dirty, {}
            topics = list(dirty)
            try:
                for at in range(0, len(topics), IN_ONE_GO):
                    await self.round(topics[at : at + IN_ONE_GO])
            except BaseException:
                for topic in topics:
                    if not topic.outbox.empty:
                        self.wake(topic)
                raise

    async def round(self, topics: Sequence[Topic]) -> None:
        """Everything that was said about these topics: acknowledgements of all in one go, the rest beside it."""
        carried: list[tuple[Topic, list[Message]]] = []
        for topic in topics:
            outbox = topic.outbox
            if outbox.others:
                others, outbox.others = outbox.others, []
                for step in self._plan(topic, others):
                    self._begin(topic, step)
            if outbox.charges:
                charges, outbox.charges = outbox.charges, []
                for same_count in messages_by_count(charges).values():
                    self._begin(topic, self._insist(topic, self._start, same_count))
            if outbox.acks:
                carried.append((topic, outbox.acks.copy()))
                outbox.acks.clear()  # the same list: workers append to it
                outbox.under_way += 1
        if not carried:
            for topic in topics:
                _look_quiet(topic)
            return
        done = 0
        try:
            answers = await self._consumer.broker.run(
                together, [self._acknowledge(topic, messages) for topic, messages in carried]
            )
            for (topic, messages), answer in zip(carried, answers, strict=True):
                await self._acknowledged(topic, messages, answer)
                done += 1
        except BaseException:
            # Cancelled with its loop, or begun again: they are said once more, or done work would be done again.
            for topic, messages in carried[done:]:
                topic.outbox.acks[:0] = messages
            raise
        finally:
            for topic, _ in carried:
                topic.outbox.under_way -= 1
            for topic in topics:
                _look_quiet(topic)

    def _acknowledge(self, topic: Topic, messages: Sequence[Message]) -> Any:
        """One conversation for a topic, whatever delivery counts its messages have."""
        return _ack_all(topic, ids_by_count(messages))

    async def _acknowledged(self, topic: Topic, messages: Sequence[Message], answer: Any) -> None:
        if isinstance(answer, MillstreamError):
            # Beside the loop: a topic that cannot be reached must not hold the others' acknowledgements up.
            self._begin(topic, self._insist(topic, self._ack, messages, answer))
            return
        for times, ids, settled, generation in answer:
            await self._heard(topic, times, ids, settled, generation)

    async def _heard(self, topic: Topic, times: int, ids: Sequence[EntryId], settled: Settled, generation: int) -> None:
        topic.tell("messaging.acked", entries=len(ids) - len(settled.refused))
        refused = settled.refused
        if refused:
            topic.tell("messaging.ack_refused", entries=len(refused))
            await self._not_ours(topic, settled, generation)
            if await self._consumer.has_namesake(topic, refused, times):
                refused = []  # it is at work on them: looking again, we would take them from it, and it from us
        self._consumer.release(topic, ids, refused=refused)

    async def drained(self, topic: Topic, *, running: bool) -> None:
        """Waits until everything that was said is done; does it itself where the loop does not run any more."""
        while not topic.outbox.empty or topic.outbox.steps:
            if not running and (topic.outbox.acks or topic.outbox.others or topic.outbox.charges):
                await self.round([topic])
            elif topic.outbox.steps:
                await asyncio.wait(list(topic.outbox.steps))
            else:
                await topic.change()

    def stop(self, topic: Topic) -> None:
        self._dirty.pop(topic, None)
        for task in topic.outbox.steps:
            task.cancel()

    def _begin(self, topic: Topic, step: Coroutine[Any, Any, None]) -> None:
        """Beside the loop: a burial that a full server refuses for an hour must not hold acknowledgements up."""
        task = asyncio.get_running_loop().create_task(step, name=f"millstream settler of {topic.name}")
        topic.outbox.steps[task] = None
        task.add_done_callback(topic.outbox.steps.pop)

    async def _insist(
        self, topic: Topic, step: Step, messages: Sequence[Message], error: MillstreamError | None = None
    ) -> None:
        """Until it is done: a broker that is away for a while costs nobody an outcome. ``error``: of a first try."""
        failures = 0
        while messages:
            generation = topic.generation
            try:
                if error is not None:
                    first, error = error, None
                    raise first
                await step(topic, messages)
                return
            except NoSuchGroup:
                # Nothing is pending any more. Making the group again brings back what was not done; what was done is
                # not in the new pending list, so there is nothing left to say about it.
                try:
                    await restore(topic, generation)
                except MillstreamError as trouble:
                    if not trouble.retryable:
                        self._give_up(topic, messages, trouble)
                        return
                    topic.tell("messaging.settle_retried", error=str(trouble))
                else:
                    ids = [one.id for one in _still_held(topic, messages) if one.id is not None]
                    self._consumer.release(topic, ids, refused=ids)
                    return
            except BrokerClosed:
                return  # the reader ends because of it, and tells
            except MillstreamError as trouble:
                if not trouble.retryable:
                    self._give_up(topic, messages, trouble)
                    return
                topic.tell("messaging.settle_retried", error=str(trouble))
            except Exception as trouble:
                # A codec that encodes no more, a bug of ours: kept to itself it would leave them in flight for ever.
                self._give_up(topic, messages, trouble)
                return
            failures += 1
            await asyncio.sleep(AGAIN.delay_ms(failures, random.random()) / 1000)  # noqa: S311 - spreads retries
            messages = _still_held(topic, messages)  # a step may be done with some, which may have come anew since

    def _give_up(self, topic: Topic, messages: Sequence[Message], error: Exception) -> None:
        # The entries stay pending; without our sign of life a sweep delivers them again, and counts.
        messages = _still_held(topic, messages)  # others are settled
        if isinstance(error, StaleOwner):
            log.info("%s is another member's by now: what was held here is handled there", topic.name)
        else:
            log.error("could not settle %d deliveries of %s: %s", len(messages), topic.name, error)
        topic.tell("messaging.settle_failed", entries=len(messages), error=text_of(error))
        self._consumer.release(topic, [message.id for message in messages if message.id is not None])

    # --- the steps --------------------------------------------------------------------------------------------------

    def _plan(self, topic: Topic, others: Sequence[tuple[Message, Outcome]]) -> list[Coroutine[Any, Any, None]]:
        outputs: dict[Message, Sequence[Message]] = {}
        retries: dict[tuple[int, bool], list[Message]] = {}
        steps: list[Coroutine[Any, Any, None]] = []
        for message, outcome in others:
            if isinstance(outcome, Ack):
                outputs[message] = outcome.outputs
            elif isinstance(outcome, Bury):
                steps.append(self._insist(topic, partial(self._bury, outcome.error), [message]))
            elif topic.book.keeps_order:
                self._rest(topic, message, _delay_of(topic, message, outcome), charged=outcome.charged)
            else:
                delay = (_delay_of(topic, message, outcome), outcome.charged)
                retries.setdefault(delay, []).append(message)
        for (delay_ms, charged), messages in retries.items():
            steps.append(self._insist(topic, partial(self._delay, delay_ms, charged), messages))
        if outputs:
            steps.append(self._insist(topic, partial(store_outputs, self._consumer, outputs), list(outputs)))
        return steps

    async def _ack(self, topic: Topic, messages: Sequence[Message]) -> None:
        for times, ids in ids_by_count(messages).items():
            generation = topic.generation
            answer = await topic.run(settle.ack_held, ids, times_delivered=times)
            await self._heard(topic, times, ids, answer, generation)

    async def _start(self, topic: Topic, messages: Sequence[Message]) -> None:
        """All of one delivery count. What was counted is started, whatever fails after that: asked once more, it would
        be counted and started twice."""
        generation, asked_at, times = topic.generation, time.monotonic(), messages[0].times_delivered
        ids = [message.id for message in messages if message.id is not None]
        answer = await topic.run(settle.count_delivery, ids, times_delivered=times)
        # What is gone can be started all the same, for we have it here: a last time.
        topic.tell_gone(answer.gone)
        refused = set(answer.refused)
        counted = [message for message in messages if message.id not in refused] if refused else messages
        topic.start_again(counted, times + 1, topic.valid_until(asked_at))
        if refused:
            await self._not_ours(topic, answer, generation)
            rest = [message for message in messages if message.id in refused]
            await self._insist(topic, self._start_counted, rest)

    async def _start_counted(self, topic: Topic, messages: Sequence[Message]) -> None:
        """A count is refused, too, where it was made before and its answer was lost: then they are ours, one further.
        Let go of and looked for, they would be passed by what comes after them in their key."""
        asked_at, times = time.monotonic(), messages[0].times_delivered
        mine = _still_held(topic, messages)
        held = await pending_here(topic, [one.id for one in mine if one.id is not None])
        idle_ms = {one.id: one.idle_ms for one in held if one.times_delivered == times + 1}
        since = asked_at - max(idle_ms.values(), default=0) / 1000
        topic.start_again([one for one in mine if one.id in idle_ms], times + 1, topic.valid_until(since))
        if left := [one.id for one in mine if one.id is not None and one.id not in idle_ms]:
            self._consumer.release(topic, left, refused=left)

    async def _not_ours(self, topic: Topic, settled: Settled, generation: int) -> None:
        """Nothing is undone where the group cannot be seen to now: the next sign of life meets it too."""
        try:
            await lost(topic, settled, generation)
        except MillstreamError as error:
            topic.tell("messaging.keeping_failed", error=str(error))

    async def _delay(self, delay_ms: int, charged: bool, topic: Topic, messages: Sequence[Message]) -> None:
        generation = topic.generation
        for times, ids in ids_by_count(messages).items():
            answer = await topic.run(settle.delay, ids, times_delivered=times, delay_ms=delay_ms)
            topic.tell_gone(answer.gone)
            if not charged:
                # In this order: while it waits for its time no sweep takes it, however free it is. Taken in between,
                # it was charged for once, which is better than to be free for everybody at once.
                back = await topic.run(settle.hand_back, ids, times_delivered=times, leaving=max(0, times - 1))
                topic.tell_gone(back.gone)
            retried = len(ids) - len(answer.refused) - len(answer.gone)
            topic.tell("messaging.retried", entries=retried, delay_ms=delay_ms)
            if answer.refused:
                await lost(topic, answer, generation)
            self._consumer.release(topic, ids, refused=answer.refused)
        self._consumer.sweeper.visit(topic, delay_ms)

    async def _bury(self, error: BaseException, topic: Topic, messages: Sequence[Message]) -> None:
        (message,) = messages
        assert message.id is not None
        text, kind, trace = describe(error)
        burial = Burial(
            stream=topic.name,
            original_id=str(message.id),
            group=topic.group,
            consumer=topic.consumer,
            deliveries=message.times_delivered,
            error=text,
            error_type=kind,
            traceback=trace,
            buried_at_ms=topic.broker.context.clock.now_ms(),
        )
        letter = bury_with(message.fields or {}, burial)
        dlq, times, generation = topic.settings.dlq, message.times_delivered, topic.generation
        buried = await topic.run(settle.bury, message.id, times_delivered=times, letter=letter, dlq=dlq)
        if buried is None:
            await not_held(topic, messages, generation)
        else:
            counted = f"{times} {'delivery' if times == 1 else 'deliveries'}"
            log.warning("buried %s of %s after %s: %s: %s", message.id, topic.name, counted, kind, text)
            topic.tell("messaging.buried", id=str(message.id), error=text, error_type=kind, deliveries=times)
        self._consumer.release(topic, [message.id], refused=() if buried is not None else messages)

    # --- retries inside the process, for keys in order --------------------------------------------------------------

    def _rest(self, topic: Topic, message: Message, delay_ms: int, *, charged: bool) -> None:
        """The message stays in the book, with our signs of life: so its key waits for it."""
        assert message.id is not None
        topic.book.delayed[message.id] = (message, charged)
        asyncio.get_running_loop().call_later(delay_ms / 1000, self._rested, topic, message)
        topic.tell("messaging.retried", entries=1, delay_ms=delay_ms)

    def _rested(self, topic: Topic, message: Message) -> None:
        assert message.id is not None
        resting, charged = topic.book.delayed.get(message.id, (None, False))
        if resting is not message:
            return  # it was let go of meanwhile
        del topic.book.delayed[message.id]
        if message.id not in topic.book.entries:
            return
        if message.id in topic.book.lost:  # others have it: it leaves, and its key goes on
            self._consumer.release(topic, [message.id])
        elif charged:
            self.charge(topic, [message])
        else:
            topic.start_again([message], message.times_delivered, message.valid_until)

    async def let_go(self, topic: Topic) -> None:
        """On closing: what rests here is free at once. Resting on elsewhere, it would let the rest of its key pass."""
        resting, topic.book.delayed = topic.book.delayed, {}
        for message, charged in resting.values():
            assert message.id is not None
            times = message.times_delivered
            leaving = times if charged else max(0, times - 1)
            answer = await topic.run(settle.hand_back, [message.id], times_delivered=times, leaving=leaving)
            topic.tell_gone(answer.gone)
            self._consumer.release(topic, [message.id])


def _ack_all(topic: Topic, ids_of: Mapping[int, list[EntryId]]) -> Any:
    """What the broker says to each delivery count's ids, and the group's generation when it was asked."""
    answers = []
    for times, ids in ids_of.items():
        generation = topic.generation
        answer = yield from topic.talk(settle.ack_held, ids, times_delivered=times)
        answers.append((times, ids, answer, generation))
    return answers


def _still_held(topic: Topic, messages: Sequence[Message]) -> list[Message]:
    held = topic.book.entries
    return [one for one in messages if one.id is not None and held.get(one.id) is one]


def _look_quiet(topic: Topic) -> None:
    if topic.outbox.empty:
        topic.changed()


def _delay_of(topic: Topic, message: Message, retry: Retry) -> int:
    if retry.delay_ms is not None:
        return retry.delay_ms
    return topic.settings.backoff.delay_ms(message.times_delivered, random.random())  # noqa: S311 - jitter
