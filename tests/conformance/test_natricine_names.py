"""Programs written for natricine run after only their imports are changed; the wire format is the same.

No ``from __future__ import annotations`` here: handlers inside tests are registered by their annotations.
"""

import msgpack
import pytest
from pydantic import BaseModel
from redis.asyncio import Redis

from millstream.natricine import (
    CommandBus,
    EventBus,
    Message,
    PydanticMarshaler,
    RedisStreamPublisher,
    RedisStreamSubscriber,
)
from millstream.testing import RedisProcess, eventually


class CreateUser(BaseModel):
    name: str


class UserCreated(BaseModel):
    name: str


async def test_publish_and_subscribe_by_position_and_by_name(redis_server: RedisProcess) -> None:
    redis = Redis.from_url(redis_server.url)
    publisher = RedisStreamPublisher(redis)
    await publisher.publish("natricine-orders", Message(payload=b'{"id": 1}'), Message(payload=b'{"id": 2}'))
    by_name = RedisStreamSubscriber(redis, group_name="a", consumer_name="worker-1", block_ms=5000, count=10)
    by_position = RedisStreamSubscriber(redis, "b", "worker-1")
    for subscriber in (by_name, by_position):
        got = []
        async for message in subscriber.subscribe("natricine-orders"):
            got.append(message.payload)
            await message.ack()
            if len(got) == 2:
                break
        await subscriber.close()
        assert got == [b'{"id": 1}', b'{"id": 2}']
    await publisher.close()
    pending = await redis.xinfo_groups("natricine-orders")
    assert {group["pending"] for group in pending} == {0}
    await redis.aclose()


async def test_nacked_message_is_redelivered(redis_server: RedisProcess) -> None:
    redis = Redis.from_url(redis_server.url)
    publisher = RedisStreamPublisher(redis)
    subscriber = RedisStreamSubscriber(redis, "a", "worker-1", claim_min_idle_ms=60_000)
    await publisher.publish("natricine-nacks", Message(payload=b"x"))
    times = []
    async for message in subscriber.subscribe("natricine-nacks"):
        times.append(message.uuid)
        if len(times) == 3:
            await message.ack()
            break
        await message.nack(delay_ms=1)
    assert len(set(times)) == 1
    await subscriber.close()
    await publisher.close()
    await redis.aclose()


async def test_wire_format_of_natricine_is_read_and_written(redis_server: RedisProcess) -> None:
    redis = Redis.from_url(redis_server.url)
    publisher = RedisStreamPublisher(redis)
    await publisher.publish("natricine-wire", Message(b"ours", {"k": "v"}, "u-1"))
    [(_, fields)] = await redis.xrange("natricine-wire")
    assert fields[b"_natricine_message_uuid"] == b"u-1"
    assert (fields[b"payload"], msgpack.unpackb(fields[b"metadata"])) == (b"ours", {"k": "v"})
    await redis.xadd(
        "natricine-wire", {"_natricine_message_uuid": "u-2", "payload": b"theirs", "metadata": b"\x81\xa1k\xa1w"}
    )
    subscriber = RedisStreamSubscriber(redis, "a", "worker-1")
    got = []
    async for message in subscriber.subscribe("natricine-wire"):
        got.append((message.uuid, message.payload, message.metadata))
        await message.ack()
        if len(got) == 2:
            break
    assert got == [("u-1", b"ours", {"k": "v"}), ("u-2", b"theirs", {"k": "w"})]
    await subscriber.close()
    await publisher.close()
    await redis.aclose()


async def test_buses_accept_a_publisher_a_subscriber_and_a_marshaler(redis_server: RedisProcess) -> None:
    redis = Redis.from_url(redis_server.url)
    publisher = RedisStreamPublisher(redis)
    done: list[str] = []
    commands = CommandBus(
        publisher=publisher,
        subscriber=RedisStreamSubscriber(redis, "commands", "worker-1"),
        marshaler=PydanticMarshaler(),
    )
    events = EventBus(publisher, RedisStreamSubscriber(redis, "events", "worker-1"), PydanticMarshaler())

    @commands.handler
    async def create(command: CreateUser) -> None:
        done.append(f"create {command.name}")
        await events.publish(UserCreated(name=command.name))

    @events.handler
    async def first(event: UserCreated) -> None:
        done.append(f"first {event.name}")

    @events.handler
    async def second(event: UserCreated) -> None:
        done.append(f"second {event.name}")

    async with commands, events:
        await commands.send(CreateUser(name="ann"))
        await eventually(lambda: len(done) >= 3, what="the command is done, and both handlers hear of it")
    assert sorted(done) == ["create ann", "first ann", "second ann"]
    assert {name.decode() for name in await redis.keys("*.*ser*")} >= {"command.CreateUser", "event.UserCreated"}
    await publisher.close()
    await redis.aclose()


@pytest.mark.parametrize(
    ("block_ms", "options", "wanted"),
    [(5_000, {}, 5_000), (0, {}, 20_000), (60_000, {}, 20_000), (60_000, {"claim_min_idle_ms": 300}, 100)],
)
def test_every_wait_of_natricine_is_accepted(block_ms: int, options: dict[str, int], wanted: int) -> None:
    redis = Redis.from_url("redis://127.0.0.1:1")
    subscriber = RedisStreamSubscriber(redis, "g", "c", block_ms=block_ms, **options)
    assert subscriber.bus_options["block_ms"] == wanted
