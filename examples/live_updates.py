"""Live updates: browsers connect and disconnect; each receives the messages published while it is connected.

The sockets here are lists, so that the example needs no browser. A browser that reconnects sends the last id that it
received, and gets the messages that it missed, if the stream still contains them.

python examples/live_updates.py, or with MILLSTREAM_URL set to a server's address.
"""

import asyncio
import os

from millstream import Broker, EntryId, open_broker
from millstream.messaging import Message, Publisher, Subscriber
from millstream.testing import eventually

SCORES = "example.scores"


class Socket:
    """What a WebSocket handler would do: forward every message until the browser leaves."""

    def __init__(self, broker: Broker, name: str, *, after: EntryId | str = "$") -> None:
        self.name = name
        self.seen: list[str] = []
        self.last: EntryId | str = after
        self._subscriber = Subscriber(broker, group=None)
        self._task = asyncio.create_task(self._forward())

    async def connected(self) -> None:
        await eventually(lambda: self._subscriber.ready, what=f"{self.name} is connected")

    async def _forward(self) -> None:
        async for message in self._subscriber.subscribe(SCORES, start=self.last):
            self.seen.append(message.payload.decode())
            assert message.id is not None
            self.last = message.id

    async def leave(self) -> EntryId | str:
        await self._subscriber.close()
        await self._task
        return self.last


async def until(socket: Socket, count: int) -> None:
    await eventually(lambda: len(socket.seen) == count, what=f"{socket.name} saw {count}")


async def main() -> None:
    async with open_broker(os.environ.get("MILLSTREAM_URL", "local://")) as broker, Publisher(broker) as publisher:
        await broker.delete_stream(SCORES, companions=True)
        await publisher.publish(SCORES, Message(b"0:0"))
        ann, bob = Socket(broker, "Ann"), Socket(broker, "Bob")
        await asyncio.gather(ann.connected(), bob.connected())
        await publisher.publish(SCORES, Message(b"1:0"))
        await asyncio.gather(until(ann, 1), until(bob, 1))

        last = await bob.leave()
        await publisher.publish(SCORES, Message(b"1:1"), Message(b"2:1"))
        await until(ann, 3)
        bob_again = Socket(broker, "Bob", after=last)
        await until(bob_again, 2)
        await publisher.publish(SCORES, Message(b"3:1"))
        await asyncio.gather(until(ann, 4), until(bob_again, 3))
        await asyncio.gather(ann.leave(), bob_again.leave())

        print(f"Ann saw {ann.seen}")
        print(f"Bob saw {bob.seen}, disconnected, reconnected and saw {bob_again.seen}")
        print(f"groups on the stream: {len(await broker.group_info(SCORES))}")
        await broker.delete_stream(SCORES, companions=True)


asyncio.run(main())
