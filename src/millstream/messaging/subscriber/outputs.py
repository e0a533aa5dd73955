"""What handlers put out: checked when they end, and stored together with the acknowledgement of their message.

In one atomic step where the streams share a slot; elsewhere the output is written first, and acknowledged after.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from millstream.broker import ROW_WORDS, Output, field_words, settle, shares_slot, xadd_many
from millstream.errors import (
    BrokerClosed,
    InvalidArgument,
    MillstreamError,
    NoSuchGroup,
    PayloadTooLarge,
    ServerError,
    StaleOwner,
)
from millstream.messaging.message import Message
from millstream.messaging.partitions import output_stream, outputs_by_stream
from millstream.messaging.subscriber.book import ids_by_count
from millstream.messaging.subscriber.membership import lost, not_held
from millstream.messaging.subscriber.topic import Topic
from millstream.model import EntryId

if TYPE_CHECKING:
    from millstream.messaging.subscriber.consumer import SharedConsumer


def outputs_of(topic: Topic, output: object) -> tuple[Sequence[Message], int]:
    """What the handler put out, and its bytes. Encoded here to see that it can be: what cannot is this handler's
    error, and not one of all messages that are settled together with it."""
    outputs = _messages(output)
    limits = topic.broker.context.limits
    size = 0
    for one in outputs:
        if topic.publish_to is not None:
            output_stream(topic.publish_to, one)
        words = field_words(topic.codec.encode(one), limits)
        if len(words) > ROW_WORDS:
            raise InvalidArgument("handler's result", f"{len(one.metadata)} keys", f"{ROW_WORDS // 2} at most")
        size += sum(map(len, words))
    if size > limits.max_atomic_bytes:
        raise PayloadTooLarge("handler's result", size, limits.max_atomic_bytes)
    return outputs, size


def _messages(output: object) -> Sequence[Message]:
    if output is None:
        return ()
    if isinstance(output, Message):
        return (output,)
    if isinstance(output, Sequence) and all(isinstance(one, Message) for one in output):
        return output
    raise InvalidArgument("handler's result", output, "a Message, a sequence of them, or None")


async def store_outputs(
    consumer: SharedConsumer, outputs: Mapping[Message, Sequence[Message]], topic: Topic, messages: Sequence[Message]
) -> None:
    """In steps that hold nobody up for long. One message's outputs are never divided: they are one atomic step.

    Raises what will not pass (a key of another type, no permission) after all that can be stored is: what is left in
    the book then is what it was raised for.
    """
    if topic.publish_to is None:
        raise InvalidArgument("outputs", "a message's outputs", "publish_to, or an acknowledgement without outputs")
    failed: MillstreamError | None = None
    for some in _portions(topic, outputs, messages):
        streams = {output_stream(topic.publish_to, one) for message in some for one in outputs[message]}
        if not shares_slot(topic.broker.context, topic.name, *streams):
            failed = await _write_and_acknowledge(consumer, topic, outputs, some) or failed
        elif error := await _store_in_one_step(consumer, topic, outputs, some):
            failed = error
            for message in some if len(some) > 1 else ():  # a step is refused as a whole: who is to blame?
                await _store_in_one_step(consumer, topic, outputs, [message])
    if failed is not None:
        raise failed


def _portions(
    topic: Topic, outputs: Mapping[Message, Sequence[Message]], messages: Sequence[Message]
) -> Iterator[list[Message]]:
    held, limits = topic.book.entries, topic.broker.context.limits
    some: list[Message] = []
    count = size = 0
    for message in messages:
        if held.get(message.id) is not message:  # type: ignore[arg-type]  # received: it has an id
            continue  # stored with an earlier step, before the one that failed and is said again
        here, weight = len(outputs[message]), sum(len(one.payload) for one in outputs[message])
        if some and (count + here > limits.script_entries or size + weight > limits.script_bytes):
            yield some
            some, count, size = [], 0, 0
        some.append(message)
        count += here
        size += weight
    if some:
        yield some


async def _store_in_one_step(
    consumer: SharedConsumer, topic: Topic, outputs: Mapping[Message, Sequence[Message]], messages: Sequence[Message]
) -> MillstreamError | None:
    """Answers what one of the messages may be to blame for alone: then nothing was done. Raises what concerns all."""
    assert topic.publish_to is not None
    target, encode, generation = topic.publish_to, topic.codec.encode, topic.generation
    step = [
        Output(
            message.id,
            message.times_delivered,
            [(output_stream(target, one), encode(one)) for one in outputs[message]],
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
    if len(answers) != len(step):  # nobody may be taken for settled without an answer of its own
        raise ServerError(f"{len(answers)} answers to {len(step)} acknowledgements", retryable=True)
    stale = [message for message, answer in zip(messages, answers, strict=True) if answer is None]
    topic.tell("messaging.acked", entries=len(answers) - len(stale))
    stored = Counter(
        stream
        for one, answer in zip(step, answers, strict=True)
        for stream, _ in (one.entries if answer is not None else ())
    )
    for stream, count in stored.items():
        topic.tell_outputs(str(stream), count)
    refused: list[EntryId] = []
    if stale:
        topic.tell("messaging.ack_refused", entries=len(stale))
        await not_held(topic, stale, generation)
    for times, ids in ids_by_count(stale).items():
        # Where a namesake is at work on them we do not look again: we would take them from it, and it from us.
        if not await consumer.has_namesake(topic, ids, times):
            refused += ids
    consumer.release(topic, [message.id for message in messages if message.id is not None], refused=refused)
    return None


async def _write_and_acknowledge(
    consumer: SharedConsumer, topic: Topic, outputs: Mapping[Message, Sequence[Message]], messages: Sequence[Message]
) -> MillstreamError | None:
    """In this order: the other way round a crash in between would lose the output. What was written is acknowledged
    whatever befalls the rest, or it would be written again. Answers what some could not be written for."""
    assert topic.publish_to is not None
    generation = topic.generation
    written: list[Message] = []
    failed: MillstreamError | None = None
    for message in messages:
        try:
            for stream, some in outputs_by_stream(topic.publish_to, outputs[message]).items():
                stored = await topic.broker.run(xadd_many, stream, [topic.codec.encode(one) for one in some])
                topic.tell_outputs(stream, len(stored))
        except MillstreamError as error:
            failed = error
            if _concerns_all(error):
                break
        else:
            written.append(message)
    refused: list[EntryId] = []
    for times, ids in ids_by_count(written).items():
        settled = await topic.run(settle.ack_held, ids, times_delivered=times)
        topic.tell("messaging.acked", entries=len(ids) - len(settled.refused))
        if settled.refused:
            topic.tell("messaging.ack_refused", entries=len(settled.refused))
            await lost(topic, settled, generation)
            if not await consumer.has_namesake(topic, settled.refused, times):
                refused += settled.refused
    consumer.release(topic, [message.id for message in written if message.id is not None], refused=refused)
    if failed is not None and _concerns_all(failed):
        raise failed
    return failed


def _concerns_all(error: MillstreamError) -> bool:
    """It may pass, or no message could be settled: none of them is to blame alone."""
    return error.retryable or isinstance(error, (BrokerClosed, NoSuchGroup, StaleOwner))
