"""The readers that Spark runs: planning on the driver, reading in the tasks. Decisions lie in ``plan`` and ``rows``.

Driver: ``partitions``, ``initialOffset``, ``latestOffset``, ``commit`` and the like, one by one in one process.
Tasks: ``read``, in other processes; the reader arrives there as a pickle, without its connection. A range is read
page by page, with the proof that none of its entries left before: each page begins at the last entry of the page
before, so that seeing that entry again proves that trimming has not passed this place. Only where it is gone, counts
are asked for, in one atomic step with the page.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from millstream.broker import BlockingBroker, gc_paused, typed
from millstream.model import EntryId
from millstream.spark import data_loss, plan
from millstream.spark.connection import broker_at, reached_broker
from millstream.spark.data_loss import Gap, gap_after
from millstream.spark.errors import DataLost
from millstream.spark.offsets import BEGINNING, Offset, Range, StreamPosition, pack, ranges
from millstream.spark.options import SourceOptions
from millstream.spark.progress import GroupProgress, warn_without_group
from millstream.spark.rows import DEFAULT_COLUMNS, ToBatch, default_batches, typed_batches
from millstream.spark.survey import RedisSurvey, survey_for, told
from millstream.wire import Batch, Command, ErrorReply, to_bytes

log = logging.getLogger("millstream.spark")


class RangesPartition(InputPartition):
    """Some ranges of some streams. Pickles; equal for equal (start, end)."""

    def __init__(self, found: Sequence[Range], book: bytes | None = None) -> None:
        super().__init__([(r.stream, str(r.after), str(r.upto)) for r in found])
        self.ranges = tuple(found)
        self.book = book
        """Where a task notes what it found missing; None where nobody asks."""


def _partitions(start: Offset, end: Offset, book: bytes | None = None) -> list[RangesPartition]:
    found = ranges(start, end)
    return [RangesPartition(each, book) for each in pack(found, end.partitions)] if found else []


class _Running(NamedTuple):
    """The batch that was planned last, and where its tasks note their data_loss."""

    start: Offset
    end: Offset
    book: bytes | None


class _Reading:
    """What both readers do in a task."""

    def __init__(self, options: SourceOptions, schema: pa.Schema, *, default_columns: bool) -> None:
        self._options = options
        self._schema = schema
        self._default_columns = default_columns
        self._to_batch()  # an unusable schema is an error on the driver, before any data moves

    def _to_batch(self) -> ToBatch:
        if self._default_columns:
            assert tuple(self._schema.names) == DEFAULT_COLUMNS
            return default_batches(self._schema, self._options.value_field)
        return typed_batches(self._schema, self._options.mode, self._options.corrupt_column)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task. Reads ranges and consumes nothing, so that any attempt gives the same rows."""
        if not isinstance(partition, RangesPartition):
            return  # Spark's stand-in for "no partitions"
        broker = broker_at(self._options.address)
        to_batch = self._to_batch()

        def on_gap(stream: str, gap: Gap) -> None:
            self._on_gap(stream, gap)
            if partition.book is not None:
                data_loss.note(broker, partition.book, stream, gap.lost)

        with gc_paused():
            for wanted in partition.ranges:
                for page in read_range(broker, wanted, self._options.page_size, on_gap):
                    batch = to_batch(wanted.stream, page)
                    if batch.num_rows:
                        yield batch

    def _on_gap(self, stream: str, gap: Gap) -> None:
        if self._options.fail_on_data_loss:
            raise DataLost(stream, gap.explanation, lost=gap.lost, certain=gap.certain)
        log.warning("data loss: %s", gap.explanation)


class RedisStreamsBatchReader(_Reading, DataSourceReader):
    def partitions(self) -> list[RangesPartition]:
        """On the driver, once for each plan."""
        survey = survey_for(reached_broker(self._options.address), self._options)
        start = plan.first_offset(survey, self._options, "earliest")
        return _partitions(start, plan.last_offset(survey, self._options, start))


class RedisStreamsReader(_Reading, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The streaming source. What is finished is the start that ``latestOffset`` gets: ``commit`` comes late."""

    def __init__(self, options: SourceOptions, schema: pa.Schema, *, default_columns: bool) -> None:
        super().__init__(options, schema, default_columns=default_columns)
        self._target: Offset | None = None
        self._surveyor: RedisSurvey | None = None
        self._planner: RedisSurvey | None = None
        self._progress = GroupProgress(options.group) if options.group is not None else None
        self._planned: Offset | None = None
        self._losses = data_loss.LossAccount()
        self._running: _Running | None = None

    def initialOffset(self) -> dict[str, Any]:
        offset = plan.first_offset(self._planning(), self._options, "latest")
        self._publish(offset)
        return offset.to_json()

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadAllAvailable() if self._options.max_rows is None else ReadMaxRows(self._options.max_rows)

    def prepareForTriggerAvailableNow(self) -> None:
        self._surveyor = self._planner = None  # a fresh look: streams that exist by now belong to this run
        self._target = plan.latest_offset(self._planning())

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """The end of the next batch; with nothing new ``start`` itself, since any other byte would start a batch."""
        finished = Offset.from_json(start)
        if self._progress is None and self._planned is None:
            warn_without_group()  # once for each start of the query, the one from a checkpoint too
        self._publish(finished)
        self._count_losses(finished)
        end = plan.next_offset(
            self._planning(),
            self._options,
            finished,
            max_rows=limit.max_rows if isinstance(limit, ReadMaxRows) else None,
            target=self._target,
            on_gap=self._on_driver_gap,
        )
        self._planned = finished if end is None else end
        return start if end is None else end.to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[RangesPartition]:
        """Also called again for the same batch, once for each action of foreachBatch: they share a book."""
        batch = _Running(Offset.from_json(start), Offset.from_json(end), None)
        if not self._options.fail_on_data_loss:
            if self._running is None or self._running[:2] != batch[:2]:
                self._running = batch._replace(book=data_loss.new_book(batch.end.streams))
            batch = self._running
        return _partitions(*batch)

    def commit(self, end: dict[str, Any]) -> None:
        self._publish(Offset.from_json(end))

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """For ``query.lastProgress``: where the streams end, and how many entries are still to be read."""
        planned = self._planned.streams if self._planned is not None else {}
        latest = plan.latest_offset(self._survey()).streams
        return {
            "streams": {name: self._report(name, end, planned.get(name, BEGINNING)) for name, end in latest.items()}
        }

    def _report(self, name: str, end: StreamPosition, planned: StreamPosition) -> dict[str, Any]:
        known = end.added is not None and planned.added is not None
        report: dict[str, Any] = {"id": str(end.id), "added": end.added}
        report["lag"] = max(0, end.added - planned.added) if known else None  # type: ignore[operator]  # known says so
        if name in self._losses.totals:
            report["lost"], report["gaps"] = self._losses.totals[name]
        return report

    def _on_driver_gap(self, stream: str, gap: Gap) -> None:
        if self._options.fail_on_data_loss or self._losses.by_driver(stream, gap):
            self._on_gap(stream, gap)

    def _count_losses(self, finished: Offset) -> None:
        """What tasks of the batch that ends here found missing. Asked for once a batch: an idle query polls often."""
        batch = self._running
        if batch is not None and batch.book is not None and batch.end == finished:
            noted = data_loss.noted(self._broker(), batch.book)
            for stream, lost in self._losses.by_tasks(noted).items():
                amount = "an unknown number of" if lost is None else lost
                log.warning("data loss: tasks of the last batch missed %s entries of stream %r", amount, stream)
            if noted:
                data_loss.forget(self._broker(), batch.book)
        self._running = None
        self._losses.planning()

    def _publish(self, finished: Offset) -> None:
        if self._progress is not None:
            self._progress.publish(self._survey(), self._broker(), finished)

    def _survey(self) -> RedisSurvey:
        if self._surveyor is None:
            self._surveyor = RedisSurvey(self._broker(), self._options)
        return self._surveyor

    def _planning(self) -> RedisSurvey:
        """What a batch may reach up to: no further than the replicas that ``durability`` asks for."""
        if self._options.durability is None:
            return self._survey()
        if self._planner is None:
            self._planner = survey_for(self._broker(), self._options)
        return self._planner

    def _broker(self) -> BlockingBroker:
        return reached_broker(self._options.address)


PAGE_BYTES = 1024 * 1024
"""What a page should weigh: big enough to be cheap, small enough that memory does not grow with the entries."""
_FIRST_PAGE = 64

RawEntries = list[Any]
OnGap = Callable[[str, Gap], None]


def read_range(broker: BlockingBroker, wanted: Range, page_size: int, on_gap: OnGap) -> Iterator[RawEntries]:
    """Yields raw entries with ``after < id <= upto``. ``on_gap`` is told what was lost, and may raise."""
    key, last = to_bytes(wanted.stream), bytes(wanted.upto)
    place = StreamPosition(wanted.after, wanted.added, wanted.exact)
    size = min(_FIRST_PAGE, page_size)
    while True:
        words = (b"XRANGE", key, bytes(place.id), last, b"COUNT", b"%d" % (size + 1))
        page: RawEntries = broker.link.call(Command(words, key, repeatable=True))
        gap = None
        if not page or page[0][0] != words[2]:
            page, gap = _page_with_proof(broker, wanted, words, place)
        if gap is not None:
            on_gap(wanted.stream, _within(gap, wanted, place))
            place = place._replace(added=None)
        full = len(page) > size
        if page and page[0][0] == words[2]:
            del page[0]
        if page:
            yield page
            reached = EntryId.parse(page[-1][0])
            place = StreamPosition(reached, None if place.added is None else place.added + len(page), place.exact)
            size = _next_size(page, page_size)
        if not full or place.id >= wanted.upto:
            return


def _within(gap: Gap, wanted: Range, place: StreamPosition) -> Gap:
    """No more than the batch held from this place on: the rest is the next batch's loss, and the driver counts it."""
    if gap.lost is None or wanted.most is None or wanted.added is None or place.added is None:
        return gap
    return gap._replace(lost=max(0, min(gap.lost, wanted.added + wanted.most - place.added)))


def _page_with_proof(
    broker: BlockingBroker, wanted: Range, words: tuple[bytes, ...], place: StreamPosition
) -> tuple[RawEntries, Gap | None]:
    """The page again, in one atomic step with what the stream says about itself.

    In two steps, trimming could come between them: it would be blamed for entries that had been read, or not be seen.
    """
    key = words[1]
    replies = broker.link.call_many(Batch([(b"XINFO", b"STREAM", key), words], key, atomic=True, repeatable=True))
    if isinstance(replies[1], ErrorReply):
        raise typed(replies[1])
    info = told(wanted.stream, replies[0])
    if info is None or info.last_generated < wanted.upto:
        text = f"stream {wanted.stream!r} held entries up to {wanted.upto} and was deleted: they were possibly lost."
        return replies[1], Gap(None, False, text)
    return replies[1], gap_after(wanted.stream, place, info)


def _next_size(page: RawEntries, page_size: int) -> int:
    """As many entries as fit into PAGE_BYTES, by the page just seen."""
    sample = page[:: max(1, len(page) // 16)]
    weight = sum(len(item[0]) + sum(map(len, item[1])) for item in sample) // len(sample) + 1
    return max(1, min(page_size, PAGE_BYTES // weight))
