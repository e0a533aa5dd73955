"""Routing, dead letters and retention on a real cluster: companion keys share the slot of their stream."""

from __future__ import annotations

import pytest

from millstream import open_broker
from millstream.broker import Limits
from millstream.broker.scripts.settle import shares_slot
from millstream.messaging import (
    DeadLetters,
    Janitor,
    Message,
    Publisher,
    RetentionPolicy,
    Router,
    deduplicate,
    partition_streams,
)
from millstream.testing import ClusterSetup, eventually

TOPICS = [f"clustered-{n}" for n in range(6)]  # in several slots, on several nodes


async def test_messages_are_routed_dead_lettered_replayed_and_trimmed_on_every_node(cluster: ClusterSetup) -> None:
    async with open_broker(cluster.url) as broker, Publisher(broker) as publisher:
        router = Router(broker, group_start="0", max_deliveries=1)
        router.use(deduplicate(window_ms=60_000, shared=broker))
        broken = True

        async def handler(message: Message) -> Message:
            if broken and message.payload == b"bad":
                raise ValueError("broken")
            return Message(b"output of " + message.payload)

        for topic in TOPICS:
            router.add(handler, topic, group="g", publish_to="clustered-outputs", name=topic)

        async def outputs(count: int) -> bool:
            return await broker.xlen("clustered-outputs") == count

        async with router:
            for topic in TOPICS:
                await publisher.publish(topic, Message(b"good", uuid="same"), Message(b"good", uuid="same"))
                await publisher.publish(topic, Message(b"bad"))
            await eventually(lambda: outputs(len(TOPICS)), what="one output a topic")
            for topic in TOPICS:
                await eventually(DeadLetters(broker, topic).count, what=f"a dead letter of {topic}")
            broken = False
            for topic in TOPICS:
                assert (await DeadLetters(broker, topic).replay()).added == 1
            await eventually(lambda: outputs(2 * len(TOPICS)), what="what was replayed")

        reports = await Janitor(broker, {"clustered-?": RetentionPolicy(keep_acked_ms=0, max_bytes=1 << 20)}).sweep()
        assert {report.retained.stream: report.retained.dropped for report in reports} == dict.fromkeys(TOPICS, 4)
        for topic in [*TOPICS, "clustered-outputs"]:
            await broker.delete_stream(topic, companions=True)


@pytest.mark.parametrize("partitions", [None, 2], ids=["a topic", "a topic split by key"])
async def test_dead_letters_in_another_slot_are_not_lost(cluster: ClusterSetup, partitions: int | None) -> None:
    """With short streams and with large entries, as in the slot of the stream and without a cluster."""
    sent = [b"%d" % number + b"x" * 1_000 for number in range(60)]
    limits = Limits(max_entry_bytes=1_100)  # the dead letter has more fields than its message, and is larger
    topic, elsewhere = f"dead_lettered-{partitions}", f"graveyard-{partitions}"
    split = {topic: partitions} if partitions else None
    async with (
        open_broker(cluster.url, max_stream_len=5, limits=limits) as broker,
        Publisher(broker, partitions=split) as publisher,
    ):
        router = Router(broker, group_start="0", max_deliveries=1)

        async def broken(message: Message) -> None:
            raise ValueError("broken")

        router.add(broken, topic, group="g", dlq=elsewhere, partitions=partitions, name="broken")
        streams = partition_streams(topic, partitions) if partitions else [topic]
        assert not all(shares_slot(broker.context, stream, elsewhere) for stream in streams)

        async def dead_lettered() -> bool:
            groups = [group for stream in streams for group in await broker.group_info(stream)]
            return len(groups) == len(streams) and all(group.pending == 0 and group.lag == 0 for group in groups)

        async with router:
            for number, payload in enumerate(sent):
                await publisher.publish(topic, Message(payload, {"key": str(number)}))
            await eventually(dead_lettered, what="everything to be dead_lettered")
        letters = await broker.xrange(elsewhere)
        assert sorted(letter.fields[b"payload"] for letter in letters) == sorted(sent)
        for stream in [*streams, elsewhere]:
            await broker.delete_stream(stream, companions=True)
