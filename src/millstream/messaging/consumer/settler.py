"""Applies outcomes (ack, retry, dead-letter) in batches; the next batch fills while one is in flight.

Handlers do not wait for it. Each outcome is one atomic operation of the broker, and its entry is released when the
broker has confirmed it. All topics share one settler.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from millstream.broker import BrokerProtocol, command_pipeline
from millstream.broker.operations.streams import xadd_many
from millstream.broker.scripts import settle
from millstream.broker.scripts.settle import Settled
from millstream.errors import BrokerClosed, MillstreamError, NoSuchGroup, StaleOwner
from millstream.messaging import tracing
from millstream.messaging.consumer.in_flight import ids_by_count, messages_by_count
from millstream.messaging.consumer.membership import Membership, pending_here
from millstream.messaging.consumer.outputs import OutputStore
from millstream.messaging.consumer.topic import Topic
from millstream.messaging.errors import DeliveriesExhausted
from millstream.messaging.failure import DeadLetterDetails, dead_letter_fields, describe, text_of
from millstream.messaging.message import Message
from millstream.messaging.outcome import ACKED, Ack, DeadLetterOutcome, Outcome, Retry, limit_deliveries
from millstream.messaging.partitions import outputs_by_stream
from millstream.model import Backoff, EntryId

log = logging.getLogger(__name__)

OperationFunction = Callable[[Topic, Sequence[Message]], Awaitable[None]]

SETTLE_BACKOFF = Backoff(initial_ms=50, max_ms=1_000, jitter=0.5)
"""Between two attempts to apply an outcome while the broker cannot be reached. Not the delay before a message
is redelivered, which is ``settings.backoff``."""
MAX_TOPICS_PER_PIPELINE = 500
"""Topics whose acknowledgements share a command pipeline."""
MAX_ENTRIES_PER_SCRIPT = 200
"""Entries of several topics that one script acknowledges: it blocks all other clients of the server."""


class _Outbox:
    """Outcomes of one topic that are not applied yet."""

    __slots__ = ("acks", "batches_in_progress", "others", "tasks", "to_count")

    def __init__(self) -> None:
        self.acks: list[Message] = []
        """Workers append here themselves, and wake the settler before the first."""
        self.others: list[tuple[Message, Outcome]] = []
        self.to_count: list[Message] = []
        """Their delivery is counted in the broker before they start again."""
        self.tasks: dict[asyncio.Task[None], None] = {}
        """Operations that run concurrently with the settler's loop."""
        self.batches_in_progress = 0
        """Batches in progress with acknowledgements of this topic."""

    @property
    def has_waiting(self) -> bool:
        return bool(self.acks or self.others or self.to_count)

    @property
    def empty(self) -> bool:
        return not (self.has_waiting or self.batches_in_progress)


class Settler:
    def __init__(
        self,
        broker: BrokerProtocol,
        membership: Membership,
        *,
        released: Callable[[Topic, bool], Any],
        retry_in: Callable[[Topic, float], Any],
    ) -> None:
        """``released``: called when entries of a topic have left the in-flight table; the flag says that the broker
        refused outcomes, so that entries may be pending here that no read returned. ``retry_in``: called when a retry
        was stored that is due in that many milliseconds."""
        self._broker = broker
        self._membership = membership
        self._released = released
        self._retry_in = retry_in
        self._outputs = OutputStore(membership, self.release)
        self._wake = asyncio.Event()
        self._outboxes: dict[Topic, _Outbox] = {}
        """Of topics that have settled something."""
        self._dirty: dict[Topic, None] = {}
        """Topics with outcomes that are not applied yet."""

    # --- called by handlers and topics --------------------------------------------------------------------------------

    def settle(self, topic: Topic, message: Message, outcome: Outcome) -> None:
        if not topic.in_flight.settle(message):
            return  # it was released: the entry is redelivered, and this outcome is dropped
        outbox = self._outbox(topic)
        if isinstance(outcome, Ack) and not outcome.outputs:
            outbox.acks.append(message)
        else:
            limited = limit_deliveries(outcome, message.times_delivered, topic.settings.max_deliveries)
            outbox.others.append((message, limited))
        self.wake(topic)

    def acks(self, topic: Topic) -> list[Message]:
        """Where a worker appends acknowledged messages. It calls ``wake`` before the first."""
        return self._outbox(topic).acks

    def wake(self, topic: Topic) -> None:
        if topic.ended:
            return  # a handler that ignored its cancellation: its message was returned to the group
        self._dirty[topic] = None
        self._wake.set()

    def count_claimed(self, topic: Topic) -> None:
        """Claimed entries start after their delivery was counted, so that one that kills its process is counted."""
        to_count, exhausted = topic.in_flight.next_to_count()
        for message in exhausted:
            message.settle(DeadLetterOutcome(DeliveriesExhausted(message.times_delivered)))
        if to_count:
            self._count(topic, to_count)

    def _count(self, topic: Topic, messages: Iterable[Message]) -> None:
        """One more start of entries that were delivered before: it is counted in the broker first."""
        self._outbox(topic).to_count += messages
        self.wake(topic)

    def _outbox(self, topic: Topic) -> _Outbox:
        outbox = self._outboxes.get(topic)
        if outbox is None:
            outbox = self._outboxes[topic] = _Outbox()
        return outbox

    def release(self, topic: Topic, ids: Iterable[EntryId], refused: Collection[object] = ()) -> None:
        """The broker confirmed what became of these: they are not in flight any more, and later entries may start.

        If it ``refused`` some, they may have been delivered to this consumer again since the request (the group was
        created again): as they were in flight, no second handler was started. So the pending entries of this consumer
        are examined; otherwise they would wait for claim_min_idle_ms.
        """
        if topic.in_flight.release(ids):
            self.count_claimed(topic)
        topic.changed()
        self._released(topic, bool(refused))
        if topic.in_flight.ready:
            topic.wake_workers()

    async def ack_now(self, topic: Topic, message: Message) -> bool:
        """For ``ACK_FIRST``: returns when the broker has confirmed it. False if another consumer has the entry."""
        accepted = False

        async def step(topic: Topic, _: Sequence[Message]) -> None:
            nonlocal accepted
            assert message.id is not None
            began_s = time.monotonic()
            reply = await topic.run(settle.ack_held, [message.id], times_delivered=message.times_delivered)
            accepted = not reply.refused
            if tracing.active is not None:
                _trace_acks(topic, [message], [reply], began_s)
            topic.emit("messaging.acked", entries=int(accepted))
            self.release(topic, [message.id])

        topic.in_flight.settle(message)
        message.mark_settled(ACKED)
        await self._repeat(topic, step, [message])
        return accepted

    async def publish(self, topic: Topic, outputs: Sequence[Message]) -> None:
        """Publishes the outputs of a message that is already acknowledged."""
        assert topic.publish_to is not None
        for stream, messages in outputs_by_stream(topic.publish_to, outputs).items():
            stored = await topic.broker.run(xadd_many, stream, [topic.codec.encode(output) for output in messages])
            topic.report_outputs(stream, len(stored))

    # --- the loop -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            dirty, self._dirty = self._dirty, {}
            topics = list(dirty)
            try:
                for at in range(0, len(topics), MAX_TOPICS_PER_PIPELINE):
                    await self.round(topics[at : at + MAX_TOPICS_PER_PIPELINE])
            except BaseException:  # restarted: what is left is applied then
                for topic in topics:
                    outbox = self._outboxes.get(topic)
                    if outbox is not None and not outbox.empty:
                        self.wake(topic)
                raise

    async def round(self, topics: Sequence[Topic]) -> None:
        """Applies all outcomes of these topics: acknowledgements in one pipeline, everything else concurrently."""
        to_ack: dict[Topic, list[Message]] = {}
        outboxes: dict[Topic, _Outbox] = {}
        for topic in topics:
            outbox = self._outboxes.get(topic)
            if outbox is None:
                continue  # removed meanwhile
            if outbox.others:
                others, outbox.others = outbox.others, []
                for operation in self._plan(topic, others):
                    self._begin(topic, operation)
            if outbox.to_count:
                to_count, outbox.to_count = outbox.to_count, []
                for same_count in messages_by_count(to_count).values():
                    self._begin(topic, self._repeat(topic, self._start, same_count))
            if outbox.acks:
                to_ack[topic] = outbox.acks.copy()
                outbox.acks.clear()  # the same list: workers append to it
                outbox.batches_in_progress += 1
                outboxes[topic] = outbox
        if not to_ack:
            self._notify_empty(topics)
            return
        try:
            if len(to_ack) > 1:
                await self._ack_streams(to_ack)
            if to_ack:
                await self._ack_each(to_ack)
        except BaseException:
            # Cancelled or restarted: the acknowledgements are sent again. Otherwise the messages would be redelivered.
            for topic, messages in to_ack.items():
                outboxes[topic].acks[:0] = messages
            raise
        finally:
            for outbox in outboxes.values():
                outbox.batches_in_progress -= 1
            self._notify_empty(topics)

    async def _ack_streams(self, to_ack: dict[Topic, list[Message]]) -> None:
        """Acknowledges entries of many topics with few scripts, and removes these topics from ``to_ack``. The others
        are acknowledged one by one: those on a Cluster, with a fence, with several delivery counts or an error."""
        began_s = time.monotonic()
        scripts: list[list[tuple[Topic, int, list[EntryId]]]] = [[]]
        size = 0
        for topic, messages in to_ack.items():
            context = topic.broker.context
            times = messages[0].times_delivered
            if context.cluster or context.fence is not None or len(messages) > MAX_ENTRIES_PER_SCRIPT:
                continue
            ids = [message.id for message in messages if message.times_delivered == times and message.id is not None]
            if len(ids) < len(messages):
                continue
            size += len(ids)
            if size > MAX_ENTRIES_PER_SCRIPT:
                scripts.append([])
                size = len(ids)
            scripts[-1].append((topic, times, ids))
        scripts = [acks for acks in scripts if len(acks) > 1]
        if not scripts:
            return
        topic = scripts[0][0][0]
        replies = await self._broker.run(
            command_pipeline,
            [
                settle.ack_streams(
                    self._broker.context,
                    topic.group,
                    topic.consumer,
                    [(topic.key, times, ids) for topic, times, ids in acks],
                )
                for acks in scripts
            ],
        )
        for acks, rejected in zip(scripts, replies, strict=True):
            failed = isinstance(rejected, MillstreamError)
            if failed and not rejected.retryable:
                continue  # acknowledged one by one, to find the stream without permission
            for position, (topic, _, ids) in enumerate(acks):
                if failed:
                    self._begin(topic, self._repeat(topic, self._ack, to_ack.pop(topic), rejected))
                elif position not in rejected:
                    messages = to_ack.pop(topic)
                    topic.emit("messaging.acked", entries=len(ids))
                    self.release(topic, ids)
                    if tracing.active is not None:
                        _trace_acks(topic, messages, (), began_s)

    async def _ack_each(self, to_ack: dict[Topic, list[Message]]) -> None:
        """Acknowledges entries of each topic with an operation of its own, and removes the topics from ``to_ack``."""
        began_s = time.monotonic()
        replies = await self._broker.run(
            command_pipeline, [self._acknowledge(topic, messages) for topic, messages in to_ack.items()]
        )
        for topic, reply in zip(list(to_ack), replies, strict=True):
            await self._acknowledged(topic, to_ack[topic], reply, began_s)
            del to_ack[topic]

    def _notify_empty(self, topics: Iterable[Topic]) -> None:
        for topic in topics:
            outbox = self._outboxes.get(topic)
            if outbox is None or outbox.empty:
                topic.changed()

    def _acknowledge(self, topic: Topic, messages: Sequence[Message]) -> Any:
        """One operation for a topic, whatever delivery counts its messages have."""
        return self._ack_all(topic, ids_by_count(messages))

    def _ack_all(self, topic: Topic, ids_of: Mapping[int, list[EntryId]]) -> Any:
        """The broker's reply for the ids of each delivery count, with the group's incarnation before the request."""
        replies = []
        for times, ids in ids_of.items():
            incarnation = self._membership.incarnation(topic)
            reply = yield from topic.operation(settle.ack_held, ids, times_delivered=times)
            replies.append((times, ids, reply, incarnation))
        return replies

    async def _acknowledged(self, topic: Topic, messages: Sequence[Message], reply: Any, began_s: float) -> None:
        if isinstance(reply, MillstreamError):
            # In a task: a topic that cannot be reached must not delay the acknowledgements of other topics.
            self._begin(topic, self._repeat(topic, self._ack, messages, reply))
            return
        for times, ids, settled, incarnation in reply:
            await self._process_reply(topic, times, ids, settled, incarnation)
        if tracing.active is not None:
            _trace_acks(topic, messages, [settled for _, _, settled, _ in reply], began_s)

    async def _process_reply(
        self, topic: Topic, times: int, ids: Sequence[EntryId], settled: Settled, incarnation: int
    ) -> None:
        topic.emit("messaging.acked", entries=len(ids) - len(settled.refused))
        refused = settled.refused
        if refused:
            topic.emit("messaging.ack_refused", entries=len(refused))
            await self._refused(topic, settled, incarnation)
            if await self._membership.detect_shared_name(topic, refused, times):
                refused = []  # the other process handles them; otherwise the two processes claim from each other
        self.release(topic, ids, refused=refused)

    async def drained(self, topic: Topic, *, running: bool) -> None:
        """Waits until all outcomes are applied; applies them itself if the loop does not run any more."""
        outbox = self._outbox(topic)
        while not outbox.empty or outbox.tasks:
            if not running and outbox.has_waiting:
                await self.round([topic])
            elif outbox.tasks:
                await asyncio.wait(list(outbox.tasks))
            else:
                await topic.change()

    def stop(self, topic: Topic) -> None:
        """Removes the topic. Outcomes that are not applied are dropped."""
        self._dirty.pop(topic, None)
        outbox = self._outboxes.pop(topic, None)
        for task in () if outbox is None else outbox.tasks:
            task.cancel()

    def _begin(self, topic: Topic, operation: Coroutine[Any, Any, None]) -> None:
        """Starts a task: a dead letter that a full server refuses for an hour must not delay acknowledgements."""
        if topic.ended:
            operation.close()
            return
        tasks = self._outbox(topic).tasks
        task = asyncio.get_running_loop().create_task(operation, name=f"millstream settler of {topic.name}")
        tasks[task] = None
        task.add_done_callback(tasks.pop)

    async def _repeat(
        self, topic: Topic, step: OperationFunction, messages: Sequence[Message], error: MillstreamError | None = None
    ) -> None:
        """Repeats the operation until it succeeds, or fails with an error that a retry cannot cure.

        ``error``: the error of a first attempt that the caller made.
        """
        failures = 0
        while messages:
            incarnation = self._membership.incarnation(topic)
            try:
                if error is not None:
                    first, error = error, None
                    raise first
                await step(topic, messages)
                return
            except NoSuchGroup:
                # The group was deleted, with its pending entries. The group that is created again redelivers unsettled
                # entries, and no settled entry is pending in it, so there is no outcome to apply.
                try:
                    await self._membership.restore(topic, incarnation)
                except MillstreamError as cause:
                    if not cause.retryable:
                        self._give_up(topic, messages, cause)
                        return
                    topic.emit("messaging.settle_retried", error=str(cause))
                else:
                    ids = [message.id for message in _still_in_flight(topic, messages) if message.id is not None]
                    self.release(topic, ids, refused=ids)
                    return
            except BrokerClosed:
                return  # the reader ends because of it, and reports it
            except MillstreamError as cause:
                if not cause.retryable:
                    self._give_up(topic, messages, cause)
                    return
                topic.emit("messaging.settle_retried", error=str(cause))
            except Exception as cause:
                # A codec that cannot encode, or a bug. If the error only ended this task, the entries would stay in
                # flight forever.
                self._give_up(topic, messages, cause)
                return
            failures += 1
            await asyncio.sleep(SETTLE_BACKOFF.delay_ms(failures, random.random()) / 1000)  # noqa: S311 - spreads retries
            messages = _still_in_flight(topic, messages)  # meanwhile, entries may have been settled or redelivered

    def _give_up(self, topic: Topic, messages: Sequence[Message], error: Exception) -> None:
        # The entries stay pending without heartbeats: a consumer claims them later, and counts the delivery.
        messages = _still_in_flight(topic, messages)  # messages that are not in flight are settled
        if isinstance(error, StaleOwner):
            log.info("%s has a new owner, which handles the messages that were in flight here", topic.name)
        else:
            log.error("could not settle %d deliveries of %s: %s", len(messages), topic.name, error)
        topic.emit("messaging.settle_failed", entries=len(messages), error=text_of(error))
        self.release(topic, [message.id for message in messages if message.id is not None])

    # --- operations ---------------------------------------------------------------------------------------------------

    def _plan(self, topic: Topic, others: Sequence[tuple[Message, Outcome]]) -> list[Coroutine[Any, Any, None]]:
        outputs: dict[Message, Sequence[Message]] = {}
        retries: dict[tuple[int, bool], list[Message]] = {}
        steps: list[Coroutine[Any, Any, None]] = []
        for message, outcome in others:
            if isinstance(outcome, Ack):
                outputs[message] = outcome.outputs
            elif isinstance(outcome, DeadLetterOutcome):
                steps.append(self._repeat(topic, partial(self._dead_letter, outcome.error), [message]))
            elif topic.in_flight.keeps_order:
                delay_ms = _retry_delay_ms(topic, message, outcome)
                self._delay_here(topic, message, delay_ms, charged=outcome.charged)
            else:
                delay = (_retry_delay_ms(topic, message, outcome), outcome.charged)
                retries.setdefault(delay, []).append(message)
        for (delay_ms, charged), messages in retries.items():
            steps.append(self._repeat(topic, partial(self._delay, delay_ms, charged), messages))
        if outputs:
            steps.append(self._repeat(topic, partial(self._outputs.store, outputs), list(outputs)))
        return steps

    async def _ack(self, topic: Topic, messages: Sequence[Message]) -> None:
        began_s = time.monotonic()
        answers: list[Settled] = []
        for times, ids in ids_by_count(messages).items():
            incarnation = self._membership.incarnation(topic)
            answers.append(await topic.run(settle.ack_held, ids, times_delivered=times))
            await self._process_reply(topic, times, ids, answers[-1], incarnation)
        if tracing.active is not None:
            _trace_acks(topic, messages, answers, began_s)

    async def _start(self, topic: Topic, messages: Sequence[Message]) -> None:
        """Counts and starts messages with the same delivery count. Once counted they start, whatever fails later: a
        repetition would count and start them twice."""
        incarnation, asked_at, times = (
            self._membership.incarnation(topic),
            time.monotonic(),
            messages[0].times_delivered,
        )
        ids = [message.id for message in messages if message.id is not None]
        answer = await topic.run(settle.count_delivery, ids, times_delivered=times)
        # The message of a deleted entry is in memory, so it is handled one more time. It cannot be redelivered.
        topic.report_gone(answer.gone)
        refused = set(answer.refused)
        counted = [message for message in messages if message.id not in refused] if refused else messages
        topic.start_again(counted, times + 1, topic.valid_until(asked_at))
        topic.in_flight.mark_gone(answer.gone)
        if refused:
            await self._refused(topic, answer, incarnation)
            uncounted = [message for message in messages if message.id in refused]
            await self._repeat(topic, self._start_if_counted, uncounted)

    async def _start_if_counted(self, topic: Topic, messages: Sequence[Message]) -> None:
        """Starts those messages of a refused count that were counted before; releases the other ones.

        A count is also refused if an earlier attempt applied it and the reply was lost. Then the entries are pending
        for this consumer with one more delivery. They start here: if they were released and recovered instead, later
        messages of their keys would overtake them."""
        asked_at, times = time.monotonic(), messages[0].times_delivered
        messages = _still_in_flight(topic, messages)
        pending = await pending_here(topic, [message.id for message in messages if message.id is not None])
        idle_ms = {entry.id: entry.idle_ms for entry in pending if entry.times_delivered == times + 1}
        since = asked_at - max(0, *idle_ms.values()) / 1000 if idle_ms else asked_at
        counted = [message for message in messages if message.id in idle_ms]
        topic.start_again(counted, times + 1, topic.valid_until(since))
        if lost_ids := [message.id for message in messages if message.id is not None and message.id not in idle_ms]:
            self.release(topic, lost_ids, refused=lost_ids)

    async def _refused(self, topic: Topic, settled: Settled, incarnation: int) -> None:
        """Checks why a request was refused. If the check fails, the next heartbeat repeats it."""
        try:
            await self._membership.process_refusal(topic, settled, incarnation)
        except MillstreamError as error:
            topic.emit("messaging.keeping_failed", error=str(error))

    async def _delay(self, delay_ms: int, charged: bool, topic: Topic, messages: Sequence[Message]) -> None:
        incarnation, began_s = self._membership.incarnation(topic), time.monotonic()
        for times, ids in ids_by_count(messages).items():
            answer = await topic.run(settle.delay, ids, times_delivered=times, delay_ms=delay_ms)
            topic.report_gone(answer.gone)
            if not charged:
                # In this order: a delayed entry is not claimed, although it was returned. If this process dies in
                # between, the delivery stays counted: better than an entry that any consumer may claim at once.
                back = await topic.run(settle.return_unstarted, ids, times_delivered=times, leaving=max(0, times - 1))
                topic.report_gone(back.gone)
            retried = len(ids) - len(answer.refused) - len(answer.gone)
            topic.emit("messaging.retried", entries=retried, delay_ms=delay_ms)
            if answer.refused:
                await self._membership.process_refusal(topic, answer, incarnation)
            self.release(topic, ids, refused=answer.refused)
            if tracing.active is not None:
                gone = {*answer.refused, *answer.gone}
                delayed = [
                    message for message in messages if message.times_delivered == times and message.id not in gone
                ]
                tracing.active.retried(topic.name, topic.group, delayed, began_s)
        self._retry_in(topic, delay_ms)

    async def _dead_letter(self, error: BaseException, topic: Topic, messages: Sequence[Message]) -> None:
        (message,) = messages
        assert message.id is not None
        began_s = time.monotonic()
        text, kind, trace = describe(error)
        details = DeadLetterDetails(
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
        letter = dead_letter_fields(message.fields or {}, details)
        dlq, times, incarnation = topic.settings.dlq, message.times_delivered, self._membership.incarnation(topic)
        letter_id = await topic.run(settle.dead_letter, message.id, times_delivered=times, fields=letter, dlq=dlq)
        if letter_id is None:
            await self._membership.check_ownership(topic, messages, incarnation)
        else:
            counted = f"{times} {'delivery' if times == 1 else 'deliveries'}"
            log.warning(
                "dead-lettered %s of %s after %s: %s: %s",
                *(message.id, topic.name, counted, kind, text),
                extra={"millstream_message": message},
            )
            topic.emit("messaging.dead_lettered", id=str(message.id), error=text, error_type=kind, deliveries=times)
            if tracing.active is not None:
                tracing.active.dead_lettered(topic.name, topic.group, message, kind, began_s)
        self.release(topic, [message.id], refused=() if letter_id is not None else messages)

    # --- retries inside the process, for keys in order ----------------------------------------------------------------

    def _delay_here(self, topic: Topic, message: Message, delay_ms: int, *, charged: bool) -> None:
        """Keeps the message in flight, with heartbeats, so that later messages of its key wait for it."""
        if not topic.in_flight.delay(message, counted=charged):
            self.release(topic, ())  # another consumer has it: later messages of its key may start
            return
        asyncio.get_running_loop().call_later(delay_ms / 1000, self._delay_over, topic, message)
        topic.emit("messaging.retried", entries=1, delay_ms=delay_ms)
        if tracing.active is not None:
            tracing.active.retried(topic.name, topic.group, [message], time.monotonic())

    def _delay_over(self, topic: Topic, message: Message) -> None:
        counted = topic.in_flight.delay_over(message)
        if counted is None:
            return  # it was released meanwhile
        if counted:
            self._count(topic, [message])
        else:
            topic.start_again([message], message.times_delivered, message.valid_until)


def _trace_acks(topic: Topic, messages: Sequence[Message], answers: Sequence[Settled], began_s: float) -> None:
    refused = {entry_id for answer in answers for entry_id in answer.refused}
    if tracing.active is not None:
        acked = [message for message in messages if message.id not in refused] if refused else messages
        tracing.active.acked(topic.name, topic.group, acked, began_s)


def _still_in_flight(topic: Topic, messages: Sequence[Message]) -> list[Message]:
    return [message for message in messages if topic.in_flight.holds(message)]


def _retry_delay_ms(topic: Topic, message: Message, retry: Retry) -> int:
    """The delay that the handler chose, else the backoff of the settings."""
    if retry.delay_ms is not None:
        return retry.delay_ms
    return topic.settings.backoff.delay_ms(message.times_delivered, random.random())  # noqa: S311 - jitter
