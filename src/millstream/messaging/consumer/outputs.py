"""Outputs of handlers: checked when a handler ends, and stored atomically with the acknowledgement of its message.

If the streams do not share a slot of a Cluster, the outputs are written first and the message is acknowledged after.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from millstream.broker import Output
from millstream.broker.context import MAX_ARGS_PER_ROW
from millstream.broker.operations.conversion import field_args
from millstream.broker.operations.streams import xadd_many
from millstream.broker.scripts import settle
from millstream.broker.scripts.settle import shares_slot
from millstream.errors import (
    BrokerClosed,
    InvalidArgument,
    MillstreamError,
    NoSuchGroup,
    PayloadTooLarge,
    ServerError,
    StaleOwner,
)
from millstream.messaging import tracing
from millstream.messaging.consumer.in_flight import ids_by_count
from millstream.messaging.consumer.membership import Membership
from millstream.messaging.consumer.topic import Topic
from millstream.messaging.message import Message
from millstream.messaging.partitions import output_stream, outputs_by_stream
from millstream.model import EntryId


def outputs_of(topic: Topic, output: object) -> tuple[Sequence[Message], int]:
    """The outputs of a handler, and their bytes. They are encoded here as a check: an error is this handler's own, and
    not one of all messages that are settled in the same batch."""
    outputs = _messages(output)
    limits = topic.broker.context.limits
    size = 0
    for message in outputs:
        if topic.publish_to is not None:
            output_stream(topic.publish_to, message)
        args = field_args(topic.codec.encode(message), limits)
        if len(args) > MAX_ARGS_PER_ROW:
            keys = f"{len(message.metadata)} keys"
            raise InvalidArgument("handler's result", keys, f"{MAX_ARGS_PER_ROW // 2} at most")
        size += sum(map(len, args))
    if size > limits.max_atomic_bytes:
        raise PayloadTooLarge("handler's result", size, limits.max_atomic_bytes)
    return outputs, size


def _messages(output: object) -> Sequence[Message]:
    if output is None:
        return ()
    if isinstance(output, Message):
        return (output,)
    if isinstance(output, Sequence) and all(isinstance(message, Message) for message in output):
        return output
    raise InvalidArgument("handler's result", output, "a Message, a sequence of them, or None")


class OutputStore:
    def __init__(self, membership: Membership, release: Callable[..., Any]) -> None:
        """``release``: called with a topic, the ids of entries whose outcome the broker has confirmed, and those that
        it ``refused``."""
        self._membership = membership
        self._release = release

    async def store(
        self, outputs: Mapping[Message, Sequence[Message]], topic: Topic, messages: Sequence[Message]
    ) -> None:
        """Stores outputs in operations of limited size. The outputs of one message are one atomic operation.

        Raises a permanent error (a key of another type, no permission) after everything else is stored: the messages
        that are still in flight then are those that it concerns.
        """
        if topic.publish_to is None:
            raise InvalidArgument("outputs", "a message's outputs", "publish_to, or an acknowledgement without outputs")
        failed: MillstreamError | None = None
        for portion in _portions(topic, outputs, messages):
            streams = {output_stream(topic.publish_to, output) for message in portion for output in outputs[message]}
            if not shares_slot(topic.broker.context, topic.name, *streams):
                failed = await self._write_and_acknowledge(topic, outputs, portion) or failed
            elif error := await self._store_in_one_step(topic, outputs, portion):
                failed = error
                for message in portion if len(portion) > 1 else ():  # stored one by one, to find the refused message
                    await self._store_in_one_step(topic, outputs, [message])
        if failed is not None:
            raise failed

    async def _store_in_one_step(
        self, topic: Topic, outputs: Mapping[Message, Sequence[Message]], messages: Sequence[Message]
    ) -> MillstreamError | None:
        """Returns an error that one of the messages may have caused: then nothing was stored. Raises other errors."""
        assert topic.publish_to is not None
        target, encode, incarnation = topic.publish_to, topic.codec.encode, self._membership.incarnation(topic)
        began_s = time.monotonic()
        step = [
            Output(
                message.id,
                message.times_delivered,
                [(output_stream(target, output), encode(output)) for output in outputs[message]],
            )
            for message in messages
            if message.id is not None
        ]
        try:
            answers = await topic.run(settle.ack_with_outputs, step)
        except MillstreamError as error:
            if _concerns_all(error):
                raise
            return error
        if len(answers) != len(step):  # no message counts as settled without its own reply
            raise ServerError(f"{len(answers)} answers to {len(step)} acknowledgements", retryable=True)
        stale = [message for message, answer in zip(messages, answers, strict=True) if answer is None]
        topic.emit("messaging.acked", entries=len(answers) - len(stale))
        stored = Counter(
            stream
            for request, answer in zip(step, answers, strict=True)
            for stream, _ in (request.entries if answer is not None else ())
        )
        for stream, count in stored.items():
            topic.report_outputs(str(stream), count)
        if tracing.active is not None:
            acked = [message for message, answer in zip(messages, answers, strict=True) if answer is not None]
            tracing.active.acked(topic.name, topic.group, acked, began_s)
        refused: list[EntryId] = []
        if stale:
            topic.emit("messaging.ack_refused", entries=len(stale))
            await self._membership.check_ownership(topic, stale, incarnation)
        for times, ids in ids_by_count(stale).items():
            # Another process with the same consumer name handles them. If both recovered them, each would claim them
            # from the other.
            if not await self._membership.detect_shared_name(topic, ids, times):
                refused += ids
        self._release(topic, [message.id for message in messages if message.id is not None], refused=refused)
        return None

    async def _write_and_acknowledge(
        self, topic: Topic, outputs: Mapping[Message, Sequence[Message]], messages: Sequence[Message]
    ) -> MillstreamError | None:
        """Writes the outputs, then acknowledges. In the other order, a crash in between would lose the outputs.

        Messages whose outputs were written are acknowledged even if the outputs of other messages fail: otherwise they
        would be written again. Returns the error of the messages that failed.
        """
        assert topic.publish_to is not None
        incarnation, began_s = self._membership.incarnation(topic), time.monotonic()
        written: list[Message] = []
        failed: MillstreamError | None = None
        for message in messages:
            try:
                for stream, batch in outputs_by_stream(topic.publish_to, outputs[message]).items():
                    stored = await topic.broker.run(xadd_many, stream, [topic.codec.encode(output) for output in batch])
                    topic.report_outputs(stream, len(stored))
            except MillstreamError as error:
                failed = error
                if _concerns_all(error):
                    break
            else:
                written.append(message)
        refused: list[EntryId] = []
        for times, ids in ids_by_count(written).items():
            settled = await topic.run(settle.ack_held, ids, times_delivered=times)
            topic.emit("messaging.acked", entries=len(ids) - len(settled.refused))
            if settled.refused:
                topic.emit("messaging.ack_refused", entries=len(settled.refused))
                await self._membership.process_refusal(topic, settled, incarnation)
                if not await self._membership.detect_shared_name(topic, settled.refused, times):
                    refused += settled.refused
        self._release(topic, [message.id for message in written if message.id is not None], refused=refused)
        if tracing.active is not None:
            acked = [message for message in written if message.id not in refused]
            tracing.active.acked(topic.name, topic.group, acked, began_s)
        if failed is not None and _concerns_all(failed):
            raise failed
        return failed


def _portions(
    topic: Topic, outputs: Mapping[Message, Sequence[Message]], messages: Sequence[Message]
) -> Iterator[list[Message]]:
    limits = topic.broker.context.limits
    portion: list[Message] = []
    count = size = 0
    for message in messages:
        if not topic.in_flight.holds(message):
            continue  # stored by an earlier attempt of this operation
        entries, output_bytes = len(outputs[message]), sum(len(output.payload) for output in outputs[message])
        if portion and (count + entries > limits.script_entries or size + output_bytes > limits.script_bytes):
            yield portion
            portion, count, size = [], 0, 0
        portion.append(message)
        count += entries
        size += output_bytes
    if portion:
        yield portion


def _concerns_all(error: MillstreamError) -> bool:
    """Whether an error concerns all messages: a transient error, or one that no single message has caused."""
    return error.retryable or isinstance(error, (BrokerClosed, NoSuchGroup, StaleOwner))
