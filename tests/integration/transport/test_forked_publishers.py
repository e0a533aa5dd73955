"""A publisher that was created before a fork, as by servers that load the program and then fork."""

from __future__ import annotations

import subprocess
import sys

from millstream import Broker
from millstream.testing import RedisProcess

FORKS = """
import asyncio, os, sys
from millstream import Message, Publisher, open_broker

broker = open_broker(sys.argv[1])
publisher = Publisher(broker)


async def send(who):
    for number in range(20):
        (stored,) = await publisher.publish("orders", Message(f"{who} {number}".encode()))
        assert stored is not None


if sys.argv[2] == "used before":
    asyncio.run(send("parent"))
children = []
for who in ("one", "two", "three"):
    child = os.fork()
    if not child:
        asyncio.run(send(who))
        os._exit(0)
    children.append(child)
assert all(os.waitpid(child, 0)[1] == 0 for child in children)
asyncio.run(send("parent, after"))
"""


async def test_parent_and_children_publish_concurrently(redis_server: RedisProcess, redis_broker: Broker) -> None:
    for before, count in (("not used before", 80), ("used before", 100)):
        words = [sys.executable, "-c", FORKS, redis_server.url, before]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)

        assert done.returncode == 0, done.stderr
        assert await redis_broker.xlen("orders") == count
        await redis_broker.delete_stream("orders")
