"""The three ways to deliver: each takes pieces of rows and answers how many it added and skipped. In a task.

Who writes is (application, version, sink, partition): the same identity again is a replay, and adds nothing."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from millstream.broker import BlockingBroker, Digest, OnceAt
from millstream.model import EntryId
from millstream.spark.bulk import BulkOnce, UniformRows
from millstream.spark.entries import Piece
from millstream.spark.errors import NoWriteIdentity
from millstream.spark.sink_options import SinkOptions


class WriteIdentity(NamedTuple):
    """``version`` only grows within an application; a lower one is a zombie, and is refused."""

    app: str
    version: int
    sink: str
    partition: int | str
    """A task's number; a word where the rows come from elsewhere."""

    @property
    def writer(self) -> str:
        """The name under which the stream remembers how far this writer has come."""
        return f"{self.app}/{self.sink}"


def streaming_identity(query_id: str | None, batch_id: str | None, sink: str, partition: int) -> WriteIdentity:
    """From what Spark tells the task. Never a fallback: without ids a replay would add every row again."""
    if not query_id or not batch_id:
        raise NoWriteIdentity(
            "this streaming write finds no query id or batch id in its task, so that a replay could not be recognised. "
            "In foreachBatch write the batch with options txnAppId and txnVersion, or choose delivery=at_least_once "
            "or exactly_once_by_event_id."
        )
    return WriteIdentity(query_id, int(batch_id), sink, partition)


class RowWriter(Protocol):
    known_again: bool
    """Rows that are stored are known when they are given again, and are not added twice."""

    def write(self, piece: Piece) -> tuple[int, int]:
        """Rows added, and rows that were there already. Their sum is the number of rows, or an error is raised."""

    def finish(self) -> None:
        """All rows were given: checks that a replay did not bring fewer than are stored."""


class ExactlyOnce:
    """``append_once``: rows and the writer's position are one atomic step. One position for each stream."""

    known_again = True

    def __init__(self, broker: BlockingBroker, options: SinkOptions, identity: WriteIdentity) -> None:
        self._broker = broker
        self._options = options
        self._identity = identity
        self._writers: dict[str, BulkOnce] = {}

    def write(self, piece: Piece) -> tuple[int, int]:
        once = self._writers.get(piece.stream)
        if once is None:
            once = self._writers[piece.stream] = BulkOnce(piece.stream, **_once_settings(self._options, self._identity))
        if isinstance(piece.rows, UniformRows):
            return self._broker.run(once.append_uniform, piece.rows)
        appended = self._broker.run(once.append_rows, piece.rows)
        return appended.added, appended.skipped

    def finish(self) -> None:
        for once in self._writers.values():
            self._broker.run(once.finish)


class ExactlyOnceAt:
    """As ``ExactlyOnce``, for rows that bring their ids."""

    known_again = True

    def __init__(self, broker: BlockingBroker, options: SinkOptions, identity: WriteIdentity) -> None:
        self._broker = broker
        self._options = options
        self._identity = identity
        self._writers: dict[str, OnceAt] = {}

    def write(self, piece: Piece) -> tuple[int, int]:
        assert piece.marks is not None
        once = self._writers.get(piece.stream)
        if once is None:
            once = self._writers[piece.stream] = OnceAt(piece.stream, **_once_settings(self._options, self._identity))
        ids = [bytes(EntryId.parse(mark, argument="idColumn")) for mark in piece.marks]
        rows = [[word, *row] for word, row in zip(ids, piece.rows, strict=True)]
        appended = self._broker.run(once.append_rows, rows)
        return appended.added, appended.skipped

    def finish(self) -> None:
        for once in self._writers.values():
            self._broker.run(once.finish)


class ExactlyOnceByEventId:
    """``append_unique``: an event id that was seen within the window is not written again, whoever brings it."""

    known_again = True

    def __init__(self, broker: BlockingBroker, options: SinkOptions) -> None:
        self._broker = broker
        self._options = options

    def write(self, piece: Piece) -> tuple[int, int]:
        assert piece.marks is not None
        pairs = [
            (mark, dict(zip(row[::2], row[1::2], strict=True)))
            for mark, row in zip(piece.marks, piece.rows, strict=True)
        ]
        appended = self._broker.append_unique(
            piece.stream,
            pairs,
            window_ms=self._options.event_id_window_ms,
            durability=self._options.durability,
        )
        return appended.added, appended.skipped

    def finish(self) -> None:
        pass


class AtLeastOnce:
    """Plain XADDs: a task or a batch that is repeated adds its rows again."""

    known_again = False

    def __init__(self, broker: BlockingBroker, options: SinkOptions) -> None:
        self._broker = broker
        self._options = options

    def write(self, piece: Piece) -> tuple[int, int]:
        fields = [dict(zip(row[::2], row[1::2], strict=True)) for row in piece.rows]
        ids = self._broker.xadd_many(piece.stream, fields, durability=self._options.durability)
        return len(ids), 0

    def finish(self) -> None:
        pass


def _once_settings(options: SinkOptions, identity: WriteIdentity) -> dict[str, Any]:
    return {
        "writer": identity.writer,
        "version": identity.version,
        "partition": str(identity.partition),
        "digest": Digest(),
        "forget_after_ms": options.forget_after_ms,
        "durability": options.durability,
    }
