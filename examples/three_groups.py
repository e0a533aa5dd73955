"""Three groups read one stream, and one of them has two consumers. The group info is printed at each step.

Groups are independent: each has its own position and its own pending entries.

python examples/three_groups.py, or with MILLSTREAM_URL set to a server's address.
"""

import asyncio
import os

from millstream import Broker, open_broker

STREAM = "example.stream"


async def show(broker: Broker, step: str) -> None:
    print(step)
    for group in await broker.group_info(STREAM):
        consumers = ", ".join(f"{consumer.name}: {consumer.pending} pending" for consumer in group.consumers) or "none"
        print(
            f"  {group.name}: pending={group.pending} read={group.entries_read} lag={group.lag} consumers=({consumers})"
        )


async def main() -> None:
    async with open_broker(os.environ.get("MILLSTREAM_URL", "local://")) as broker:
        await broker.delete_stream(STREAM, companions=True)

        # "0": the group receives every entry of the stream. "$": only entries that are added from now on.
        for group in ("group1", "group2", "group3"):
            await broker.create_group(STREAM, group, start="0")
        await show(broker, "three groups, no entry")

        for number in (1, 2):
            await broker.xadd(STREAM, {"message": f"hello {number}"})
        await show(broker, "two entries")

        first = await broker.xreadgroup(STREAM, "group1", "consumer1", count=1)
        second = await broker.xreadgroup(STREAM, "group1", "consumer2", count=1)
        print(f"consumer1 got {first[0].fields}, consumer2 got {second[0].fields}")
        await show(broker, "group1 has read both, each consumer one")

        await broker.xack(STREAM, "group1", [first[0].id, second[0].id])
        await show(broker, "group1 has acknowledged both")

        redelivered = [
            *await broker.xreadgroup(STREAM, "group1", "consumer1", count=10),
            *await broker.xreadgroup(STREAM, "group1", "consumer2", count=10),
        ]
        print(f"nothing is delivered twice in group1: {redelivered == []}")
        unread = await broker.xreadgroup(STREAM, "group2", "consumer1", count=10)
        print(f"group2 still gets both: {len(unread) == 2}")
        await show(broker, "group2 has read both")
        await broker.delete_stream(STREAM, companions=True)


asyncio.run(main())
