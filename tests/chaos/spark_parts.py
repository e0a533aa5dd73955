"""The parts of Spark's source and of a pipeline's queue, driven as Spark drives them, without a session around them.

After an error the same batch is repeated from the last finished offset, as Spark does.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.streaming.datasource import ReadAllAvailable

from chaos.parts import Part
from millstream.errors import MillstreamError
from millstream.pipelines.redis_address import SecretFiles
from millstream.pipelines.sink_queue import StoredBatch
from millstream.pipelines.sinks import Write
from millstream.pipelines.sinks.redis import RedisSink
from millstream.spark.options import source_options
from millstream.spark.reader import RedisStreamsReader
from millstream.spark.rows import DEFAULT_COLUMNS
from millstream.storage import open_storage

TYPES = {
    "stream": pa.string(),
    "id": pa.string(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "value": pa.binary(),
    "fields": pa.map_(pa.string(), pa.binary()),
}


class BatchesPart(Part):
    """Batches, one after the other, each retried until it succeeds."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.sent: list[str] = []

    async def more(self) -> list[str]:
        tokens = [f"{self.name}:{len(self.sent) + n}" for n in range(10)]
        self.sent += tokens
        return tokens

    async def tried(self, batch: Callable[[], None]) -> bool:
        try:
            await asyncio.to_thread(batch)
        except MillstreamError as error:
            self.raised.append(error)
        except Exception as error:
            self.foreign.append(error)
        else:
            return True
        return False


class SparkSourcePart(BatchesPart):
    """Plans batches, reads them, and publishes its position as that of a group."""

    kind = "spark source"

    async def begin(self) -> None:
        asked = {"url": self.url, "subscribe": self.name, "group": "g", "startingOffsets": "earliest"}
        options = source_options(asked | {"deadlineMs": "30000"}, streaming=True)
        schema = pa.schema([(name, TYPES[name]) for name in DEFAULT_COLUMNS])
        await self.steady.xadd_many(self.name, [{"event": token} for token in await self.more()])
        self._reader = RedisStreamsReader(options, schema, default_columns=True)
        self._read: Counter[str] = Counter()
        self._finished = self._reader.initialOffset()

    async def work(self) -> None:
        await self.steady.xadd_many(self.name, [{"event": token} for token in await self.more()])
        await self.tried(self._batch)

    async def lift(self) -> None:
        await self.tried(self._batch)
        await self.tried(self._batch)  # publishes where the last one ended

    def _batch(self) -> None:
        end = self._reader.latestOffset(self._finished, ReadAllAvailable())
        if end == self._finished:
            return
        result = [
            value.decode()
            for partition in self._reader.partitions(self._finished, end)
            for rows in self._reader.read(partition)
            for value in rows.column("value").to_pylist()
        ]
        self._read.update(result)  # as a sink that stores a batch atomically
        self._finished = end

    async def verdict(self) -> str:
        wrong = {token: self._read[token] for token in self.sent if self._read[token] != 1}
        [group] = await self.steady.group_info(self.name)
        behind = "" if group.lag == 0 else f"; the group says that {group.lag} are to be read"
        return f"not read once: {wrong}{behind}" if wrong or behind else ""


class SinkQueuePart(BatchesPart):
    """A pipeline's optional sink: batches that wait on disk are delivered from the driver, in order, once each."""

    kind = "sink queue"
    transactions = True

    async def begin(self) -> None:
        config = {"id": "late", "uri": self.url, "stream": self.name, "required": False, "batch_timeout": "30s"}
        self._sink = RedisSink.model_validate({"type": "redis", "config": config})
        self._directory = tempfile.TemporaryDirectory(prefix="millstream-")
        self._waiting: list[StoredBatch] = []
        self._batches = 0

    async def work(self) -> None:
        rows = pa.table({"event": await self.more()})
        place = Path(self._directory.name, str(self._batches))
        place.mkdir()
        pq.write_table(rows, place / "part.parquet")
        files = (("part.parquet", (place / "part.parquet").stat().st_size),)
        storage = open_storage(self._directory.name)
        self._waiting.append(StoredBatch(storage, self._batches, place.name, rows.num_rows, files))
        self._batches += 1
        await self._deliver()

    async def lift(self) -> None:
        await self._deliver()

    async def _deliver(self) -> None:
        while self._waiting:
            if not await self.tried(self._first):
                return
            self._waiting.pop(0)

    def _first(self) -> None:
        batch = self._waiting[0]
        session: Any = None  # delivery needs no Spark session
        self._sink.deliver(session, batch, Write(self.name, batch.id, "late", "exactly_once", SecretFiles()))

    async def verdict(self) -> str:
        self._directory.cleanup()
        there = Counter(entry.text("event") for entry in await self.steady.xrange(self.name))
        wrong = {token: there[token] for token in self.sent if there[token] != 1}
        return f"{len(self._waiting)} batches wait, not there once: {wrong}" if wrong or self._waiting else ""
