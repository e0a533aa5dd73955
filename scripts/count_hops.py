"""Counts the hops of a publish: functions of ours that are entered from ``Publisher.publish`` until it is carried out.

A hop is a Python function of the package that is entered, a coroutine or generator once, however often it goes on;
comprehensions do not count. Counted is the second publish to a topic, when everything is open. On ``local://`` the way
ends where the engine executes the command, on ``redis://`` where the wire has sent it.

``python scripts/count_hops.py [URL]`` prints them in their order, with their files.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import FrameType
from typing import Any
from uuid import uuid4

from millstream import Message, Publisher, open_broker

SOURCE = str(Path(__file__).parents[1] / "src" / "millstream")
LAST = {"Engine.execute", "AsyncConnection.exchange"}
"""The hop that ends the way."""


class Hops:
    def __init__(self) -> None:
        self.entered: list[tuple[str, str]] = []
        self._frames: list[FrameType] = []
        self._done = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or self._done or not frame.f_code.co_filename.startswith(SOURCE):
            return
        name = frame.f_code.co_name
        if name.startswith("<") or any(frame is seen for seen in self._frames):
            return
        self._frames.append(frame)
        file = frame.f_code.co_filename.removeprefix(SOURCE + "/")
        self.entered.append((file, frame.f_code.co_qualname))
        self._done = frame.f_code.co_qualname in LAST


async def hops(url: str) -> list[tuple[str, str]]:
    """File and function of each hop of one publish."""
    async with open_broker(url) as broker, Publisher(broker) as publisher:
        topic = f"hops-{uuid4().hex}"
        await publisher.publish(topic, Message(b"first"))
        await asyncio.sleep(0.01)  # what the first one left to do is none of the second one's hops
        message, counter = Message(b"second"), Hops()
        sys.setprofile(counter)
        try:
            await publisher.publish(topic, message)
        finally:
            sys.setprofile(None)
        await broker.delete_stream(topic, companions=True)
    return counter.entered


def main() -> None:
    found = asyncio.run(hops(sys.argv[1] if len(sys.argv) > 1 else "local://"))
    for file, function in found:
        print(f"  {file}: {function}")
    print(f"{len(found)} hops through {len({file for file, _ in found})} files")


if __name__ == "__main__":
    main()
