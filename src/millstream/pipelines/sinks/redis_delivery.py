"""Batches that waited on disk, into Redis, from the driver: rows in the order of their files, exactly once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millstream import open_blocking_broker
from millstream.broker.limits import Limits
from millstream.model import Durability, TrimPolicy
from millstream.pipelines.sinks.sink import Delivered

if TYPE_CHECKING:
    from millstream.broker.blocking_broker import BlockingBroker
    from millstream.broker.steps.once import BlockingOnceWriter
    from millstream.pipelines.sinks.redis import RedisSinkConfig
    from millstream.pipelines.sinks.sink import Write

_CHUNK = 5_000
Fields = dict[str | bytes, Any]


def deliver(config: RedisSinkConfig, stream: str | None, directory: Path, write: Write) -> Delivered:
    """Writes the batch's rows to ``stream``, or each to the stream that it names, and says how much it was.

    The files do not change between tries, so position and digest identify rows whatever plan made them.
    """
    writers: dict[str, BlockingOnceWriter] = {}
    rows = size = 0
    limits = Limits(connect_ms=config.connect_timeout, answer_ms=config.send_timeout)
    with open_blocking_broker(config.uri, deadline_ms=config.batch_timeout, limits=limits) as broker:
        for name, entries in _chunks(directory, stream):
            if name not in writers:
                writers[name] = _writer(broker, config, name, write)
            writers[name].append(entries)
            rows += len(entries)
            size += sum(len(entry["event"].encode()) for entry in entries)
        for writer in writers.values():
            writer.finish()
    return Delivered(rows, size)


def _writer(broker: BlockingBroker, config: RedisSinkConfig, stream: str, write: Write) -> BlockingOnceWriter:
    return broker.once_writer(
        stream,
        f"{write.application}/{write.sink}",
        write.version,
        partition="spool",
        trim=_trim(config.maxlen),
        durability=Durability.parse(config.durability) if config.durability else None,
    )


def _trim(maxlen: str | None) -> TrimPolicy | None:
    if maxlen is None:
        return None
    return TrimPolicy(max_len=int(maxlen.removeprefix("~")), approximate=maxlen.startswith("~"))


def _chunks(directory: Path, stream: str | None) -> Iterator[tuple[str, list[Fields]]]:
    import pyarrow.parquet as pq

    for file in sorted(directory.glob("*.parquet")):
        with pq.ParquetFile(file) as parquet:
            for batch in parquet.iter_batches(batch_size=_CHUNK):
                by_stream: dict[str, list[Fields]] = {}
                for row in batch.to_pylist():
                    name = stream if stream is not None else row.pop("stream")
                    by_stream.setdefault(name, []).append({k: v for k, v in row.items() if v is not None})
                yield from by_stream.items()
