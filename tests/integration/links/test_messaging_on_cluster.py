"""Routing, dead letters and retention over a real cluster: companion keys share a stream's slot, outputs need not."""

from __future__ import annotations

from millstream import open_broker
from millstream.messaging import DeadLetters, Janitor, Message, Publisher, RetentionPolicy, Router, deduplicate
from millstream.testing import ClusterSetup, eventually

TOPICS = [f"clustered-{n}" for n in range(6)]  # in several slots, on several nodes


async def test_messages_are_routed_buried_replayed_and_trimmed_on_every_node(cluster: ClusterSetup) -> None:
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
