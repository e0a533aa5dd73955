"""The reader that Spark runs: planning on the driver, beside the session's thread; decoding in the tasks.

Driver: ``initialOffset``, ``latestOffset``, ``partitions``, one by one in one process that lives as long as the query.
Tasks: ``read``, in other processes; the reader arrives there as a pickle, without planner and session.
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
from millstream.cdc.decoding import SCHEMA, Decoding, emptied_event
from millstream.cdc.errors import SegmentDamaged
from millstream.cdc.offsets import ChangeOffset
from millstream.cdc.planner import ChunkBatch, LogBatch, Planner
from millstream.cdc.segments import Segment, read_segment
from millstream.cdc.snapshot import Unseen

_SLICE = 20_000
"""Rows in one Arrow batch at most: Spark holds several of them."""


class LanePartition(InputPartition):
    """One lane of a stretch of the log."""

    def __init__(self, batch: LogBatch, lane: int) -> None:
        super().__init__([lane, batch.after, batch.upto])
        self.batch, self.lane = batch, lane


class ChunkPartition(InputPartition):
    """One chunk of a snapshot."""

    def __init__(self, generation: int, index: int, position: int) -> None:
        super().__init__([generation, index])
        self.generation, self.index, self.position = generation, index, position


class ChangesReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """What is finished is the start that ``latestOffset`` gets; only that is acknowledged to the server."""

    def __init__(self, database: ChangeDatabase) -> None:
        self._database = database
        self._planner: Planner | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_planner": None}

    def initialOffset(self) -> dict[str, Any]:
        return self._plan().first_offset().to_json()

    def getDefaultReadLimit(self) -> ReadLimit:
        most = self._database.options.max_changes
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:
        self._plan().end_now()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """The end of the next batch; with nothing new ``start`` itself, since any other byte would start a batch."""
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        end = self._plan().next_offset(ChangeOffset.from_json(start), most)
        return start if end is None else end.to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        batch = self._plan().batch(ChangeOffset.from_json(start), ChangeOffset.from_json(end))
        if isinstance(batch, ChunkBatch):
            return [ChunkPartition(batch.generation, index, batch.position) for index in batch.chunks]
        return [] if batch is None else [LanePartition(batch, lane) for lane in range(batch.lanes)]

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return self._plan().report()

    def stop(self) -> None:
        if self._planner is not None:
            self._planner.close()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task. Reads files that never change, so that every attempt gives the same rows in the same order."""
        if isinstance(partition, LanePartition):
            rows = self._lane(partition)
        elif isinstance(partition, ChunkPartition):
            rows = self._chunk(partition)
        else:
            return  # Spark's stand-in for "no partitions"
        for batch in rows:
            for first in range(0, batch.num_rows, _SLICE):
                yield batch.slice(first, _SLICE)

    def _plan(self) -> Planner:
        if self._planner is None:
            self._planner = Planner(self._database)
        return self._planner

    def _lane(self, partition: LanePartition) -> Iterator[pa.RecordBatch]:
        batch, database = partition.batch, self._database
        unseen = None if batch.seen is None else Unseen(snapshot.read_seen(Path(batch.seen)), database.locate)
        lane, lanes = partition.lane, batch.lanes
        how = replace(database.decoding(), lane=lane, lanes=lanes, after=batch.after, upto=batch.upto, keep=unseen)
        for file in batch.files:
            yield database.decode_changes(_opened(Path(file)), how)

    def _chunk(self, partition: ChunkPartition) -> Iterator[pa.RecordBatch]:
        database = self._database
        directory = Path(database.options.segments)
        plan = snapshot.read_plan(directory, partition.generation)
        chunk = plan.chunk(partition.index)
        if chunk is None:
            yield _emptied(plan, database.decoding())
            return
        path = snapshot.chunk_path(directory, plan.generation, partition.index)
        if not path.exists():  # else an earlier attempt has read it, and its rows are what this chunk is
            database.read_chunk(path, chunk)
        name = f"snapshot-{plan.generation}-{partition.index}"
        rows = database.decode_chunk(_opened(path), database.decoding(), name)
        if rows is not None:
            yield rows


def _opened(path: Path) -> Segment:
    try:
        return read_segment(path)
    except FileNotFoundError as error:
        why = "it is not there. The segments directory must be on storage that driver and executors share"
        raise SegmentDamaged(str(path), why) from error


def _emptied(plan: snapshot.SnapshotPlan, how: Decoding) -> pa.RecordBatch:
    """Tables whose rows begin again are emptied first; the log's own word of it is dropped, for all chunks saw it."""
    rows = []
    for turn in plan.emptied:
        for name, half in turn["tables"].items():
            schema, _, table = name.partition(".")
            place = {"lsn": turn["lsn"], "order": turn["number"], "ts_ms": turn["ts_ms"]}
            transaction = str(turn.get("transaction", turn["xid"]))
            rows.append(emptied_event(how, schema, table, half, transaction=transaction, **place))
    return pa.RecordBatch.from_pylist(rows, schema=SCHEMA)
