"""The stream reader that Spark calls: planning on the driver, decoding in the tasks.

Driver: ``initialOffset``, ``latestOffset`` and ``partitions`` are called one at a time in a process that lives as long
as the query. The session's thread runs in the same process.
Tasks: ``read`` is called in worker processes, on a pickled copy of the reader without planner and session.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from millstream.cdc import snapshot
from millstream.cdc.database import ChangeDatabase
from millstream.cdc.decoding import SCHEMA, Decoding, truncate_event
from millstream.cdc.errors import SegmentDamaged
from millstream.cdc.identity import split_full_name
from millstream.cdc.offsets import ChangeOffset
from millstream.cdc.planner import ChunkBatch, LogBatch, Planner
from millstream.cdc.segments import Segment, read_segment
from millstream.cdc.snapshot import UnseenChanges
from millstream.cdc.transfer import PackedRows, unpack

_MAX_ROWS_PER_ARROW_BATCH = 20_000
"""Maximum number of rows in an Arrow batch. Spark keeps several batches in memory."""


class LogPartition(InputPartition):
    """One partition of a log batch: all changes, or the changes of some of the keys."""

    def __init__(self, batch: LogBatch, index: int) -> None:
        super().__init__([index, batch.after, batch.upto])
        self.batch, self.index = batch, index


class ChunkPartition(InputPartition):
    """One chunk of a snapshot."""

    def __init__(self, generation: int, index: int, rows: PackedRows | None = None) -> None:
        super().__init__([generation, index])
        self.generation, self.index, self.rows = generation, index, rows


class TruncationPartition(InputPartition):
    """Truncations to send before the rows of a snapshot."""

    def __init__(self, generation: int, emptied: list[dict[str, Any]]) -> None:
        super().__init__([generation])
        self.generation, self.emptied = generation, emptied


class ChangesReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The stream reader of all change formats.

    Spark passes the end of the last finished batch to ``latestOffset``; only that position is acknowledged to the
    server.
    """

    def __init__(self, database: ChangeDatabase) -> None:
        self._database = database
        self._planner: Planner | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_planner": None}

    def initialOffset(self) -> dict[str, Any]:
        return self._plan().first_offset().to_json()

    def getDefaultReadLimit(self) -> ReadLimit:
        limit = self._database.options.max_changes
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    def prepareForTriggerAvailableNow(self) -> None:
        self._plan().end_now()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """The end of the next batch. Returns ``start`` itself if nothing is new: Spark compares the JSON text, and any
        difference would start a batch."""
        max_changes = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        end = self._plan().next_offset(ChangeOffset.from_json(start), max_changes)
        return start if end is None else end.to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        batch = self._plan().batch(ChangeOffset.from_json(start), ChangeOffset.from_json(end))
        if isinstance(batch, ChunkBatch):
            return list(self._chunk_partitions(batch))
        return [] if batch is None else [LogPartition(batch, index) for index in range(batch.partitions)]

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return self._plan().report()

    def stop(self) -> None:
        if self._planner is not None:
            self._planner.close()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Runs in a task. Reads files that never change, so every attempt returns the same rows in the same order."""
        if isinstance(partition, LogPartition):
            rows = self._log_rows(partition)
        elif isinstance(partition, ChunkPartition):
            rows = self._chunk_rows(partition)
        elif isinstance(partition, TruncationPartition):
            rows = iter([_truncations(partition, self._database.decoding())])
        else:
            return  # Spark's placeholder for "no partitions"
        for batch in rows:
            for first in range(0, batch.num_rows, _MAX_ROWS_PER_ARROW_BATCH):
                yield batch.slice(first, _MAX_ROWS_PER_ARROW_BATCH)

    def _plan(self) -> Planner:
        if self._planner is None:
            self._planner = Planner(self._database)
        return self._planner

    def _log_rows(self, partition: LogPartition) -> Iterator[pa.RecordBatch]:
        batch, database = partition.batch, self._database
        seen_tables = batch.seen_tables
        if isinstance(seen_tables, int):
            seen_tables = snapshot.read_seen(database.options.storage(), seen_tables)
        unseen = None if seen_tables is None else UnseenChanges(seen_tables, database.locate)
        index, partitions = partition.index, batch.partitions
        decoding = replace(
            database.decoding(),
            partition=index,
            partitions=partitions,
            after=batch.after,
            upto=batch.upto,
            change_filter=unseen,
        )
        for segment in batch.segments:
            content = unpack(segment) if isinstance(segment, bytes) else _read_segment(Path(segment))
            yield database.decode_changes(content, decoding)

    def _chunk_partitions(self, batch: ChunkBatch) -> Iterator[InputPartition]:
        planner = self._plan()
        emptied = planner.emptied(batch)
        if emptied:
            yield TruncationPartition(batch.generation, emptied)
        if self._database.options.segments_shared:
            for index in batch.chunks[1:] if emptied else batch.chunks:
                yield ChunkPartition(batch.generation, index)
            return
        for index, parts in planner.packed_chunks(batch):
            for rows in parts:
                yield ChunkPartition(batch.generation, index, rows)

    def _chunk_rows(self, partition: ChunkPartition) -> Iterator[pa.RecordBatch]:
        database, rows = self._database, partition.rows
        name = f"snapshot-{partition.generation}-{partition.index}"
        if rows is not None:
            yield from database.decode_chunk(unpack(rows.content), database.decoding(), name, rows.first)
            return
        storage = database.options.storage()
        chunk = snapshot.read_plan(storage, partition.generation).chunk(partition.index)
        assert chunk is not None, "truncations have a partition of their own"
        path = Path(storage.location, snapshot.chunk_name(partition.generation, partition.index))
        if not path.exists():  # else an earlier attempt has read it, and the chunk consists of those rows
            database.read_chunk(path, chunk)
        yield from database.decode_chunk(_read_segment(path), database.decoding(), name)


def _read_segment(path: Path) -> Segment:
    try:
        return read_segment(path)
    except FileNotFoundError as error:
        why = "it does not exist. With segmentsShared the tasks must be able to read the driver's segments directory"
        raise SegmentDamaged(str(path), why) from error


def _truncations(partition: TruncationPartition, decoding: Decoding) -> pa.RecordBatch:
    """Truncate events for tables with a new snapshot. The truncation in the log is dropped: all chunks include it."""
    rows = []
    for truncation in partition.emptied:
        for name, sub_event in truncation["tables"].items():
            schema, table = split_full_name(name)
            at = {"lsn": truncation["lsn"], "order": truncation["number"], "ts_ms": truncation["ts_ms"]}
            if "changed" in truncation:
                opening = f"snapshot-{partition.generation}-0"
                rows.append(
                    truncate_event(decoding, schema, table, sub_event, transaction=opening, place=opening, **at)
                )
                continue
            transaction = str(truncation.get("transaction", truncation["xid"]))
            rows.append(truncate_event(decoding, schema, table, sub_event, transaction=transaction, **at))
    return pa.RecordBatch.from_pylist(rows, schema=SCHEMA)
