"""Brings outcomes about, in batches: while one batch is on its way, the next one gathers.

In: outcomes, from handlers that never wait for it. Out: the broker's atomic steps, and then the entry leaves the book.
Nothing is said to be done before its handler is; nothing leaves the book before the broker confirmed it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from millstream.broker import Output, Settled, settle, shares_slot
from millstream.errors import BrokerClosed, InvalidArgument, MillstreamError, NoSuchGroup
from millstream.messaging.burial import Burial, bury_with, describe
from millstream.messaging.message import Message
from millstream.messaging.outcome import ACKED, Ack, Bury, Outcome, Retry, limit_deliveries
from millstream.messaging.subscriber.desk import Desk
from millstream.messaging.subscriber.held import ids_by_count
from millstream.model import EntryId
from millstream.model.clock import monotonic_ms

log = logging.getLogger(__name__)

Step = Callable[[Sequence[Message]], Awaitable[None]]

PAUSE_S = (0.05, 1.0)
"""Between tries while the broker cannot be reached: first, and at most."""


class Settler:
    def __init__(
        self,
        desk: Desk,
        *,
        release: Callable[[Iterable[EntryId]], None],
        ready_again: Callable[[Message, int, float], None],
        lost: Callable[[Settled, int], Awaitable[None]],
        group_gone: Callable[[int], Awaitable[None]],
        due_in: Callable[[int], None],
    ) -> None:
        self._desk = desk
        self._release = release
        self._ready_again = ready_again
        self._lost = lost
        self._group_gone = group_gone
        self._due_in = due_in
        self.publish_to: str | None = None
        self.acks: list[Message] = []
        """Acknowledgements that gather. Workers append here themselves, and call ``wake`` before the first."""
        self._others: list[tuple[Message, Outcome]] = []
        self._charges: list[Message] = []
        self._resting: dict[EntryId, tuple[asyncio.TimerHandle, Message, bool]] = {}
        """Messages that wait for a retry inside this process, because they hold their key back; whether the start that
        they wait after is charged."""
        self._steps: set[asyncio.Task[None]] = set()
        self._wanted = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    # --- what handlers and the intake say ---------------------------------------------------------------------------

    def settle(self, message: Message, outcome: Outcome) -> None:
        if isinstance(outcome, Ack) and not outcome.outputs:
            self.acks.append(message)
        else:
            limit = self._desk.settings.max_deliveries
            self._others.append((message, limit_deliveries(outcome, message.times_delivered, limit)))
        self.wake()

    def charge(self, message: Message) -> None:
        """One more start of an entry that was delivered before: counted first, then ready."""
        self._charges.append(message)
        self.wake()

    async def ack_now(self, message: Message) -> bool:
        """For at most once: returns when the broker has it, False if the entry is not ours any more."""
        accepted = False

        async def step(_: Sequence[Message]) -> None:
            nonlocal accepted
            desk = self._desk
            assert message.id is not None
            settled = await desk.broker.run(
                settle.ack_held,
                desk.topic,
                desk.group,
                desk.consumer,
                [message.id],
                times_delivered=message.times_delivered,
            )
            accepted = not settled.refused
            desk.tell("messaging.acked", entries=int(accepted))
            self._release([message.id])

        message.mark_settled(ACKED)
        await self._insist(step, [message])
        return accepted

    async def publish(self, outputs: Sequence[Message]) -> None:
        """Outputs of a message that is acknowledged already."""
        desk = self._desk
        assert self.publish_to is not None
        await desk.broker.xadd_many(self.publish_to, [desk.codec.encode(output) for output in outputs])
        desk.tell_outputs(self.publish_to, len(outputs))

    def wake(self) -> None:
        self._idle.clear()
        self._wanted.set()

    # --- the loop ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        while True:
            await self._wanted.wait()
            await self._round()

    async def _round(self) -> None:
        self._wanted.clear()
        acks = self.acks.copy()
        self.acks.clear()
        others, self._others = self._others, []
        charges, self._charges = self._charges, []
        for step in self._plan(others):
            self._begin(step)
        if charges:
            self._begin(self._insist(self._start, charges))
        try:
            await self._insist(self._ack, acks)
        except BaseException:
            # Cancelled with its loop, or begun again: they are said once more, or done work would be done again.
            self.acks[:0] = acks
            self._wanted.set()
            raise
        if not self._wanted.is_set():
            self._idle.set()

    async def drained(self, *, running: bool) -> None:
        """Waits until everything that was said is done; does it itself where the loop does not run any more."""
        if running:
            await self._idle.wait()
        else:
            while self._wanted.is_set():
                await self._round()
        while self._steps:
            await asyncio.wait(self._steps)

    def stop(self) -> None:
        for task in self._steps:
            task.cancel()

    def _begin(self, step: Coroutine[Any, Any, None]) -> None:
        """Beside the loop: a burial that a full server refuses for an hour must not hold acknowledgements up."""
        task = asyncio.get_running_loop().create_task(step, name=f"millstream settler of {self._desk.topic}")
        self._steps.add(task)
        task.add_done_callback(self._steps.discard)

    async def _insist(self, step: Step, messages: Sequence[Message]) -> None:
        """Until it is done: a broker that is away for a while costs nobody an outcome."""
        if not messages:
            return
        pause = PAUSE_S[0]
        while True:
            generation = self._desk.generation
            try:
                await step(messages)
                return
            except NoSuchGroup:
                # Nothing is pending any more. Making the group again brings back what was not done; what was done is
                # not in the new pending list, so there is nothing left to say about it.
                try:
                    await self._group_gone(generation)
                except MillstreamError as error:
                    if not error.retryable:
                        self._give_up(messages, error)
                        return
                    self._desk.tell("messaging.settle_retried", error=str(error))
                else:
                    self._release([message.id for message in messages if message.id is not None])
                    return
            except BrokerClosed:
                return  # the reader ends because of it, and tells
            except MillstreamError as error:
                if not error.retryable:
                    self._give_up(messages, error)
                    return
                self._desk.tell("messaging.settle_retried", error=str(error))
            except Exception as error:
                # A codec that encodes no more, a bug of ours: kept to itself it would leave them in flight for ever.
                self._give_up(messages, error)
                return
            await asyncio.sleep(pause * (0.5 + random.random() / 2))  # noqa: S311 - spreads retries, hides nothing
            pause = min(PAUSE_S[1], pause * 2)

    def _give_up(self, messages: Sequence[Message], error: Exception) -> None:
        # The entries stay pending; without our sign of life a sweep delivers them again, and counts.
        log.error("could not settle %d deliveries of %s: %s", len(messages), self._desk.topic, error)
        self._desk.tell("messaging.settle_failed", entries=len(messages), error=str(error))
        self._release([message.id for message in messages if message.id is not None])

    # --- the steps --------------------------------------------------------------------------------------------------

    def _plan(self, others: Sequence[tuple[Message, Outcome]]) -> list[Coroutine[Any, Any, None]]:
        outputs: dict[Message, Sequence[Message]] = {}
        retries: dict[tuple[int, bool], list[Message]] = {}
        steps: list[Coroutine[Any, Any, None]] = []
        for message, outcome in others:
            if isinstance(outcome, Ack):
                outputs[message] = outcome.outputs
            elif isinstance(outcome, Bury):
                steps.append(self._insist(partial(self._bury, outcome.error), [message]))
            elif self._desk.lanes is not None:
                self._rest(message, self._delay_of(message, outcome), charged=outcome.charged)
            else:
                retries.setdefault((self._delay_of(message, outcome), outcome.charged), []).append(message)
        for (delay_ms, charged), messages in retries.items():
            steps.append(self._insist(partial(self._delay, delay_ms, charged), messages))
        if outputs:
            steps.append(self._insist(partial(self._publish, outputs), list(outputs)))
        return steps

    def _delay_of(self, message: Message, retry: Retry) -> int:
        if retry.delay_ms is not None:
            return retry.delay_ms
        return self._desk.settings.backoff.delay_ms(message.times_delivered, random.random())  # noqa: S311 - jitter

    async def _ack(self, messages: Sequence[Message]) -> None:
        desk = self._desk
        groups = ids_by_count(messages)
        generation = desk.generation
        for times, ids in groups.items():
            settled = await desk.broker.run(
                settle.ack_held, desk.topic, desk.group, desk.consumer, ids, times_delivered=times
            )
            desk.tell("messaging.acked", entries=len(ids) - len(settled.refused))
            if settled.refused:
                desk.tell("messaging.ack_refused", entries=len(settled.refused))
                await self._lost(settled, generation)
            self._release(ids)

    async def _start(self, messages: Sequence[Message]) -> None:
        desk = self._desk
        generation = desk.generation
        for times, ids in ids_by_count(messages).items():
            asked_at = monotonic_ms() / 1000
            settled = await desk.broker.run(
                settle.count_delivery, desk.topic, desk.group, desk.consumer, ids, times_delivered=times
            )
            # It can be started all the same, for we have it here: a last time.
            desk.tell_gone(settled.gone)
            refused = set(settled.refused)
            for message in messages:
                if message.times_delivered == times and message.id not in refused:
                    self._ready_again(message, times + 1, desk.valid_until(asked_at))
            if refused:
                await self._lost(settled, generation)
                self._release(refused)

    async def _delay(self, delay_ms: int, charged: bool, messages: Sequence[Message]) -> None:
        desk = self._desk
        generation = desk.generation
        for times, ids in ids_by_count(messages).items():
            settled = await desk.broker.run(
                settle.delay, desk.topic, desk.group, desk.consumer, ids, times_delivered=times, delay_ms=delay_ms
            )
            desk.tell_gone(settled.gone)
            if not charged:
                # In this order: while it waits for its time no sweep takes it, however free it is. Taken in between,
                # it was charged for once, which is better than to be free for everybody at once.
                back = await desk.broker.run(
                    settle.hand_back,
                    desk.topic,
                    desk.group,
                    desk.consumer,
                    ids,
                    times_delivered=times,
                    leaving=max(0, times - 1),
                )
                desk.tell_gone(back.gone)
            retried = len(ids) - len(settled.refused) - len(settled.gone)
            desk.tell("messaging.retried", entries=retried, delay_ms=delay_ms)
            if settled.refused:
                await self._lost(settled, generation)
            self._release(ids)
        self._due_in(delay_ms)

    async def _bury(self, error: BaseException, messages: Sequence[Message]) -> None:
        desk = self._desk
        (message,) = messages
        assert message.id is not None
        text, kind, trace = describe(error)
        burial = Burial(
            stream=desk.topic,
            original_id=str(message.id),
            group=desk.group,
            consumer=desk.consumer,
            deliveries=message.times_delivered,
            error=text,
            error_type=kind,
            traceback=trace,
            buried_at_ms=desk.broker.context.clock.now_ms(),
        )
        letter = bury_with(message.fields or {}, burial)
        dlq, times = desk.settings.dlq, message.times_delivered
        if dlq is None or shares_slot(desk.broker.context, desk.topic, dlq):
            buried = await desk.broker.run(
                settle.bury,
                desk.topic,
                desk.group,
                desk.consumer,
                message.id,
                times_delivered=times,
                letter=letter,
                dlq=dlq,
            )
        else:
            # Another slot: written first, acknowledged after. A crash in between buries it twice, and never loses it.
            buried = await desk.broker.xadd(dlq, letter)
            await desk.broker.run(
                settle.ack_held, desk.topic, desk.group, desk.consumer, [message.id], times_delivered=times
            )
        if buried is not None:
            log.warning("buried %s of %s after %d deliveries: %s: %s", message.id, desk.topic, times, kind, text)
            desk.tell("messaging.buried", id=str(message.id), error=text, error_type=kind, deliveries=times)
        self._release([message.id])

    async def _publish(self, outputs: Mapping[Message, Sequence[Message]], messages: Sequence[Message]) -> None:
        """In steps that hold nobody up for long. One message's outputs are never divided: they are one atomic step."""
        held = self._desk.held.entries
        limits = self._desk.broker.context.limits
        some: list[Message] = []
        count = size = 0
        for message in messages:
            if held.get(message.id) is not message:  # type: ignore[arg-type]  # received: it has an id
                continue  # stored with an earlier step, before the one that failed and is said again
            here, weight = len(outputs[message]), sum(len(one.payload) for one in outputs[message])
            if some and (count + here > limits.script_entries or size + weight > limits.script_bytes):
                await self._publish_some(outputs, some)
                some, count, size = [], 0, 0
            some.append(message)
            count += here
            size += weight
        await self._publish_some(outputs, some)

    async def _publish_some(self, outputs: Mapping[Message, Sequence[Message]], messages: Sequence[Message]) -> None:
        desk = self._desk
        if self.publish_to is None:
            raise InvalidArgument("outputs", "a message's outputs", "publish_to, or an acknowledgement without outputs")
        target, encode = self.publish_to, desk.codec.encode
        if shares_slot(desk.broker.context, desk.topic, target):
            step = [
                Output(message.id, message.times_delivered, [(target, encode(one)) for one in outputs[message]])
                for message in messages
                if message.id is not None
            ]
            answers = await desk.broker.run(settle.ack_with_outputs, desk.topic, desk.group, desk.consumer, step)
            refused = sum(answer is None for answer in answers)
            desk.tell("messaging.acked", entries=len(answers) - refused)
            desk.tell_outputs(target, sum(len(ids) for ids in answers if ids is not None))
            if refused:
                desk.tell("messaging.ack_refused", entries=refused)
        else:
            # The output first: the other way round a crash in between would lose it.
            for message in messages:
                await desk.broker.xadd_many(target, [encode(one) for one in outputs[message]])
                desk.tell_outputs(target, len(outputs[message]))
            for times, ids in ids_by_count(messages).items():
                settled = await desk.broker.run(
                    settle.ack_held, desk.topic, desk.group, desk.consumer, ids, times_delivered=times
                )
                desk.tell("messaging.acked", entries=len(ids) - len(settled.refused))
        self._release([message.id for message in messages if message.id is not None])

    # --- retries inside the process, for keys in order --------------------------------------------------------------

    def _rest(self, message: Message, delay_ms: int, *, charged: bool) -> None:
        """The message stays in the book, with our signs of life: so its key waits for it."""
        assert message.id is not None
        entry_id = message.id
        timer = asyncio.get_running_loop().call_later(delay_ms / 1000, self._rested, entry_id)
        self._resting[entry_id] = (timer, message, charged)
        self._desk.tell("messaging.retried", entries=1, delay_ms=delay_ms)

    def _rested(self, entry_id: EntryId) -> None:
        _, message, charged = self._resting.pop(entry_id)
        if entry_id not in self._desk.held.entries:
            return
        if charged:
            self.charge(message)
        else:
            self._ready_again(message, message.times_delivered, message.valid_until)

    async def let_go(self) -> None:
        """On closing: what rests here is free at once. Resting on elsewhere, it would let the rest of its key pass."""
        desk = self._desk
        resting, self._resting = self._resting, {}
        for timer, message, charged in resting.values():
            timer.cancel()
            assert message.id is not None
            times = message.times_delivered
            leaving = times if charged else max(0, times - 1)
            settled = await desk.broker.run(
                settle.hand_back,
                desk.topic,
                desk.group,
                desk.consumer,
                [message.id],
                times_delivered=times,
                leaving=leaving,
            )
            desk.tell_gone(settled.gone)
            self._release([message.id])
