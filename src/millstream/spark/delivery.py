"""The deliveries of the sink: each writes rows in a task and returns how many were added and skipped.

A writer's identity is (application, version, sink, partition). The same identity again is a replay: its rows are
skipped."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from millstream.broker import BlockingBroker, Digest
from millstream.broker.scripts.append_once import OnceAt
from millstream.broker.scripts.append_unique import append_unique
from millstream.model import EntryId
from millstream.spark.bulk import BulkOnce, UniformRows
from millstream.spark.entries import Piece
from millstream.spark.errors import NoWriteIdentity
from millstream.spark.sink_options import SinkOptions
from millstream.spark.task_record import RowsGiven, TaskRecord, WrittenPosition


class WriteIdentity(NamedTuple):
    """``version`` only increases within an application. A lower version is of a replaced writer, and is rejected."""

    app: str
    version: int
    sink: str
    partition: int | str
    """A task's number, or a name if the rows do not come from a Spark task."""
    replayable: bool = True
    """False if the application id was created for this write, so that only its own tasks can repeat it."""

    @property
    def writer(self) -> str:
        """The name of this writer's marker in the stream."""
        return f"{self.app}/{self.sink}"


def streaming_identity(query_id: str | None, batch_id: str | None, sink: str, partition: int) -> WriteIdentity:
    """The identity from the task's properties. There is no fallback: without ids a replay would add all rows again."""
    if not query_id or not batch_id:
        raise NoWriteIdentity(
            "this streaming write has no query id or batch id in its task, so a replay could not be recognised. "
            "In foreachBatch write the batch with options txnAppId and txnVersion, or choose delivery=at_least_once "
            "or exactly_once_by_event_id."
        )
    return WriteIdentity(query_id, int(batch_id), sink, partition)


class RowWriter(Protocol):
    is_idempotent: bool
    """Whether rows that are stored are recognised and skipped when they are written again."""

    def write(self, piece: Piece) -> tuple[int, int]:
        """Returns rows added, and rows skipped because they were stored. Their sum is the number of rows."""

    def finish(self) -> list[RowsGiven]:
        """Called after the last row. Verifies that a replay did not have fewer rows than are stored.

        Returns the number of rows for each position, if rows are recognised by position."""


class _ByPosition:
    """The base of both forms of ``append_once``: records how the write was split into tasks."""

    def __init__(self, broker: BlockingBroker, options: SinkOptions, identity: WriteIdentity) -> None:
        self._broker = broker
        self._options = options
        self._identity = identity
        self._records: dict[str, TaskRecord] = {}
        self._end_at_max_rows: Piece | None = None

    def _count(self, piece: Piece) -> None:
        """Called before rows are written. Rows that are written again because they were not confirmed count once."""
        if piece is self._end_at_max_rows or not self._identity.replayable:
            return
        record = self._records.get(piece.stream)
        if record is None:
            identity = self._identity
            position = WrittenPosition(piece.stream, identity.writer, identity.version)
            record = TaskRecord(self._broker, position, identity.partition)
            self._records[piece.stream] = record
        record.add(len(piece.rows))
        self._end_at_max_rows = piece

    def _rows_given(self) -> list[RowsGiven]:
        return [record.rows_given() for record in self._records.values()]


class ExactlyOnce(_ByPosition):
    """``append_once``: stores rows and the writer's position atomically, with one position for each stream."""

    is_idempotent = True

    def __init__(self, broker: BlockingBroker, options: SinkOptions, identity: WriteIdentity) -> None:
        super().__init__(broker, options, identity)
        self._writers: dict[str, BulkOnce] = {}

    def write(self, piece: Piece) -> tuple[int, int]:
        self._count(piece)
        once = self._writers.get(piece.stream)
        if once is None:
            once = self._writers[piece.stream] = BulkOnce(piece.stream, **_once_settings(self._options, self._identity))
        if isinstance(piece.rows, UniformRows):
            return self._broker.run(once.append_uniform, piece.rows)
        appended = self._broker.run(once.append_rows, piece.rows)
        return appended.added, appended.skipped

    def finish(self) -> list[RowsGiven]:
        for once in self._writers.values():
            self._broker.run(once.finish)
        return self._rows_given()


class ExactlyOnceAt(_ByPosition):
    """As ``ExactlyOnce``, for rows with explicit ids."""

    is_idempotent = True

    def __init__(self, broker: BlockingBroker, options: SinkOptions, identity: WriteIdentity) -> None:
        super().__init__(broker, options, identity)
        self._writers: dict[str, OnceAt] = {}

    def write(self, piece: Piece) -> tuple[int, int]:
        assert piece.marks is not None
        self._count(piece)
        once = self._writers.get(piece.stream)
        if once is None:
            once = self._writers[piece.stream] = OnceAt(piece.stream, **_once_settings(self._options, self._identity))
        ids = [bytes(EntryId.parse(mark, argument="idColumn")) for mark in piece.marks]
        rows = [[entry_id, *row] for entry_id, row in zip(ids, piece.rows, strict=True)]
        appended = self._broker.run(once.append_rows, rows)
        return appended.added, appended.skipped

    def finish(self) -> list[RowsGiven]:
        for once in self._writers.values():
            self._broker.run(once.finish)
        return self._rows_given()


class ExactlyOnceByEventId:
    """``append_unique``: an event id that was written within the window is skipped, whichever task writes it."""

    is_idempotent = True

    def __init__(self, broker: BlockingBroker, options: SinkOptions) -> None:
        self._broker = broker
        self._options = options

    def write(self, piece: Piece) -> tuple[int, int]:
        assert piece.marks is not None
        pairs = [
            (mark, dict(zip(row[::2], row[1::2], strict=True)))
            for mark, row in zip(piece.marks, piece.rows, strict=True)
        ]
        appended = self._broker.run(
            append_unique,
            piece.stream,
            pairs,
            window_ms=self._options.event_id_window_ms,
            durability=self._options.durability,
        )
        return appended.added, appended.skipped

    def finish(self) -> list[RowsGiven]:
        return []


class AtLeastOnce:
    """Plain XADD: a repeated task or batch adds its rows again."""

    is_idempotent = False

    def __init__(self, broker: BlockingBroker, options: SinkOptions) -> None:
        self._broker = broker
        self._options = options

    def write(self, piece: Piece) -> tuple[int, int]:
        fields = [dict(zip(row[::2], row[1::2], strict=True)) for row in piece.rows]
        ids = self._broker.xadd_many(piece.stream, fields, durability=self._options.durability)
        return len(ids), 0

    def finish(self) -> list[RowsGiven]:
        return []


def _once_settings(options: SinkOptions, identity: WriteIdentity) -> dict[str, Any]:
    return {
        "writer": identity.writer,
        "version": identity.version,
        "partition": str(identity.partition),
        "digest": Digest(),
        "forget_after_ms": options.forget_after_ms,
        "durability": options.durability,
    }
