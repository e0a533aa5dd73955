"""Counts hops: functions of ours that are entered on the way of a message, or of rows through a pipeline.

A hop is a Python function of the package that is entered, a coroutine or generator once, however often it goes on;
comprehensions do not count.

A publish is counted from ``Publisher.publish`` until it is carried out: the second one to a topic, when everything is
open. On ``local://`` the way ends where the engine executes the command, on ``redis://`` where the wire sends it.

Rows go through a pipeline in Arrow batches, and only the two ends are Python of ours: the source's task (here of
``redis_streams``) until a batch is made, and the sink's task from the moment that it takes a batch, through digest and
atomic step, until the wire sends it. Counted is the second batch of each, when everything is open. Between them,
processors and envelopes are expressions that Spark runs; ``python`` and ``sql`` processors are not counted.

``python scripts/count_hops.py [URL]`` prints a publish's in their order, with their files;
``python scripts/count_hops.py --rows URL`` those of a batch of rows.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from millstream import Message, Publisher, open_blocking_broker, open_broker

if TYPE_CHECKING:
    import pyarrow as pa

SOURCE = str(Path(__file__).parents[1] / "src" / "millstream")
LAST = {"Engine.execute", "AsyncConnection.exchange", "BlockingConnection.exchange"}
"""The hop that ends the way."""


class Hops:
    def __init__(self, last: Collection[str] = LAST) -> None:
        self._last = last
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
        self._done = frame.f_code.co_qualname in self._last


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


def batch_hops(url: str, rows: int = 100) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """File and function of each hop of a batch of rows: in the source's task, and in the sink's. Needs Spark's Python,
    and no Spark: what runs is what runs in the tasks."""
    from pyspark.sql.types import StructType

    from millstream.spark import write_here
    from millstream.spark.source import RedisStreamsSource

    def given() -> Iterator[pa.RecordBatch]:
        yield first
        sys.setprofile(writing)
        yield second
        sys.setprofile(None)

    reading, writing = Hops(()), Hops()
    names = source, sink = f"hops-{uuid4().hex}", f"hops-{uuid4().hex}"
    with open_blocking_broker(url) as broker:
        broker.xadd_many(source, [{"event": str(number)} for number in range(65 + rows)])
        ours = RedisStreamsSource({"url": url, "subscribe": source, "pageSize": str(max(rows, 65))})
        schema = ours.schema()
        reader = ours.reader(StructType.fromDDL(schema) if isinstance(schema, str) else schema)
        [partition] = reader.partitions()
        batches = reader.read(partition)
        first = next(batches)
        sys.setprofile(reading)
        try:
            second = next(batches)
        finally:
            sys.setprofile(None)
        assert second.num_rows == rows
        first, second = (one.select(["id", "value"]) for one in (first, second))
        options = {"url": url, "stream": sink, "content": "columns", "txnAppId": "hops", "txnVersion": "1"}
        try:
            write_here(options, first.schema, given(), partition="0")
        finally:
            sys.setprofile(None)
        for name in names:
            broker.delete_stream(name, companions=True)
    return reading.entered, writing.entered


def _print(found: list[tuple[str, str]]) -> None:
    for file, function in found:
        print(f"  {file}: {function}")
    print(f"{len(found)} hops through {len({file for file, _ in found})} files")


def main() -> None:
    if "--rows" in sys.argv:
        for found in batch_hops(sys.argv[-1]):
            _print(found)
    else:
        _print(asyncio.run(hops(sys.argv[1] if len(sys.argv) > 1 else "local://")))


if __name__ == "__main__":
    main()
