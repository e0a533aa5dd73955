"""The readers that Spark runs: they plan batches on the driver and read ranges in the tasks.

Driver: ``partitions``, ``initialOffset``, ``latestOffset``, ``commit`` and similar, one after the other in one process.
Tasks: ``read``, in other processes; the reader is pickled to them without its connection.

A range is read page by page. Each page starts at the last entry of the previous page: if that entry still exists,
trimming has not passed it, and no later entry was trimmed. If it is missing, the stream's counts are read atomically
with the page.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, Filter, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from millstream.broker import BlockingBroker
from millstream.broker.bulk import gc_paused
from millstream.broker.failures import typed_error
from millstream.model import EntryId
from millstream.spark import data_loss, plan
from millstream.spark.connection import broker_at, connected_broker
from millstream.spark.data_loss import Gap, gap_after
from millstream.spark.errors import DataLost
from millstream.spark.filters import ColumnKind, Selection, push_filters
from millstream.spark.offsets import BEGINNING, Offset, Range, StreamPosition, expected, pack, ranges
from millstream.spark.options import SourceOptions
from millstream.spark.progress import GroupProgress, warn_without_group
from millstream.spark.rows import (
    DEFAULT_COLUMNS,
    Page,
    ToBatch,
    bounded_pages,
    default_batches,
    entry_bytes,
    grouped_pages,
    typed_batches,
)
from millstream.spark.stream_stats import RedisStreamStats, parse_stream_info, stream_stats_for
from millstream.wire import Args, Batch, Command, ErrorReply, to_bytes

log = logging.getLogger("millstream.spark")

VERIFY_IDLE_S = 10.0
"""How often streams without new entries are checked for being recreated. An idle query polls 100 times a second."""


class RangesPartition(InputPartition):
    """Ranges of one or more streams. Pickles; the same (start, end) give the same partitions."""

    def __init__(self, entry_ranges: Sequence[Range], gap_key: bytes | None = None) -> None:
        super().__init__([(r.stream, str(r.after), str(r.upto)) for r in entry_ranges])
        self.ranges = tuple(entry_ranges)
        self.gap_key = gap_key
        """Where a task records gaps; None if the driver does not read them."""


def _partitions(start: Offset, end: Offset, gap_key: bytes | None = None) -> list[RangesPartition]:
    batch_ranges = ranges(start, end)
    return [RangesPartition(group, gap_key) for group in pack(batch_ranges, end.partitions)] if batch_ranges else []


class _PlannedBatch(NamedTuple):
    """The batch that was planned last, and the key where its tasks record gaps."""

    start: Offset
    end: Offset
    gap_key: bytes | None


class _RangeReader:
    """Reads ranges in a task; the base of both readers."""

    def __init__(self, options: SourceOptions, schema: pa.Schema, *, default_columns: bool) -> None:
        self._options = options
        self._schema = schema
        self._default_columns = default_columns
        self._to_batch()  # raises the error of an unusable schema on the driver, before any data is read

    def _to_batch(self) -> ToBatch:
        if self._default_columns:
            assert tuple(self._schema.names) == DEFAULT_COLUMNS
            return default_batches(self._schema, self._options.value_field)
        return typed_batches(self._schema, self._options.mode, self._options.corrupt_column)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Called in a task. Consumes nothing, so that each attempt gives the same rows."""
        if not isinstance(partition, RangesPartition):
            return  # Spark's placeholder if there are no partitions
        broker = broker_at(self._options.address)
        to_batch = self._to_batch()

        def on_gap(stream: str, gap: Gap) -> None:
            self._on_gap(stream, gap)
            if partition.gap_key is not None:
                data_loss.record_gap(broker, partition.gap_key, stream, gap.lost)

        def pages() -> Iterator[tuple[str, Page]]:
            for stream, page in read_ranges(broker, partition.ranges, self._options.page_size, on_gap):
                for part in bounded_pages(page, self._options.max_entry_bytes):
                    yield stream, part

        with gc_paused():
            for group in grouped_pages(pages()):
                batch = to_batch(group)
                if batch.num_rows:
                    yield batch

    def _on_gap(self, stream: str, gap: Gap) -> None:
        if self._options.fail_on_data_loss:
            raise DataLost(stream, gap.explanation, lost=gap.lost, certain=gap.certain)
        log.warning("data loss: %s", gap.explanation)


class RedisStreamsBatchReader(_RangeReader, DataSourceReader):
    def __init__(self, options: SourceOptions, schema: pa.Schema, *, default_columns: bool) -> None:
        super().__init__(options, schema, default_columns=default_columns)
        self._selection = Selection()

    def partitions(self) -> list[RangesPartition]:
        """Called on the driver, once for each plan."""
        stats = stream_stats_for(connected_broker(self._options.address), self._options)
        return [RangesPartition(group) for group in plan.batch_ranges(stats, self._options, self._selection)]


class FilteringBatchReader(RedisStreamsBatchReader):
    """A batch reader for sessions with filter pushdown."""

    def __init__(
        self,
        options: SourceOptions,
        schema: pa.Schema,
        *,
        default_columns: bool,
        filter_columns: Mapping[str, ColumnKind],
    ) -> None:
        super().__init__(options, schema, default_columns=default_columns)
        self._filter_columns = filter_columns

    def pushFilters(self, filters: list[Filter]) -> list[Filter]:
        """Called on the driver before ``partitions``. Returns the filters that Spark must evaluate."""
        self._selection, remaining = push_filters(filters, self._filter_columns)
        return remaining


class RedisStreamsReader(_RangeReader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The streaming reader. ``latestOffset`` receives the finished offset as its start; ``commit`` is called later."""

    def __init__(self, options: SourceOptions, schema: pa.Schema, *, default_columns: bool) -> None:
        super().__init__(options, schema, default_columns=default_columns)
        self._target: Offset | None = None
        self._current_stats: RedisStreamStats | None = None
        self._replicated_stats: RedisStreamStats | None = None
        self._progress = GroupProgress(options.group) if options.group is not None else None
        self._planned: Offset | None = None
        self._verify_idle_at = 0.0
        self._losses = data_loss.LossAccount()
        self._current_batch: _PlannedBatch | None = None

    def initialOffset(self) -> dict[str, Any]:
        offset = plan.first_offset(self._planning_stats(), self._options, "latest")
        self._publish(offset)
        return offset.to_json()

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadAllAvailable() if self._options.max_rows is None else ReadMaxRows(self._options.max_rows)

    def prepareForTriggerAvailableNow(self) -> None:
        self._current_stats = self._replicated_stats = (
            None  # list the streams again: this run includes all that exist now
        )
        self._target = plan.latest_offset(self._planning_stats())

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """The end of the next batch, or ``start`` unchanged if there are no new entries.

        Spark runs a batch for any other value.
        """
        finished = Offset.from_json(start)
        if self._progress is None and self._planned is None:
            warn_without_group()  # once for each start of the query, also from a checkpoint
        self._publish(finished)
        self._count_losses(finished)
        now = time.monotonic()
        verify_idle = now >= self._verify_idle_at
        if verify_idle:
            self._verify_idle_at = now + VERIFY_IDLE_S
        end = plan.next_offset(
            self._planning_stats(),
            self._options,
            finished,
            max_rows=limit.max_rows if isinstance(limit, ReadMaxRows) else None,
            target=self._target,
            on_gap=self._on_driver_gap,
            verify_idle=verify_idle,
        )
        self._planned = finished if end is None else end
        return start if end is None else end.to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[RangesPartition]:
        """Called once for each action of foreachBatch on a batch; they share one key of gaps."""
        batch = _PlannedBatch(Offset.from_json(start), Offset.from_json(end), None)
        if not self._options.fail_on_data_loss:
            if self._current_batch is None or self._current_batch[:2] != batch[:2]:
                self._current_batch = batch._replace(gap_key=data_loss.new_gap_key(batch.end.streams))
            batch = self._current_batch
        return _partitions(*batch)

    def commit(self, end: dict[str, Any]) -> None:
        self._publish(Offset.from_json(end))

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """For ``query.lastProgress``: the ends of the streams, and the number of entries still to be read."""
        planned = self._planned.streams if self._planned is not None else {}
        latest = plan.latest_offset(self._stats()).streams
        return {
            "streams": {name: self._report(name, end, planned.get(name, BEGINNING)) for name, end in latest.items()}
        }

    def _report(self, name: str, end: StreamPosition, planned: StreamPosition) -> dict[str, Any]:
        report: dict[str, Any] = {"id": str(end.id), "added": end.added}
        unread = expected(planned, end)
        report["lag"] = None if unread is None else max(0, unread)
        if name in self._losses.totals:
            report["lost"], report["gaps"] = self._losses.totals[name]
        return report

    def _on_driver_gap(self, stream: str, gap: Gap) -> None:
        if self._options.fail_on_data_loss or self._losses.add_driver_gap(stream, gap):
            self._on_gap(stream, gap)

    def _count_losses(self, finished: Offset) -> None:
        """Counts the gaps that tasks of the finished batch recorded: once for each batch, not at each poll."""
        batch = self._current_batch
        if batch is not None and batch.gap_key is not None and batch.end == finished:
            recorded = data_loss.recorded_gaps(self._broker(), batch.gap_key)
            for stream, lost in self._losses.add_task_gaps(recorded).items():
                amount = "an unknown number of" if lost is None else lost
                log.warning("data loss: tasks of the last batch could not read %s entries of stream %r", amount, stream)
            if recorded:
                data_loss.delete_gap_record(self._broker(), batch.gap_key)
        self._current_batch = None
        self._losses.start_planning()

    def _publish(self, finished: Offset) -> None:
        if self._progress is not None:
            self._progress.publish(self._stats(), self._broker(), finished)

    def _stats(self) -> RedisStreamStats:
        if self._current_stats is None:
            self._current_stats = RedisStreamStats(self._broker(), self._options)
        return self._current_stats

    def _planning_stats(self) -> RedisStreamStats:
        """The stream stats to plan with: only entries that are on the replicas which ``durability`` requires."""
        if self._options.durability is None:
            return self._stats()
        if self._replicated_stats is None:
            self._replicated_stats = stream_stats_for(self._broker(), self._options)
        return self._replicated_stats

    def _broker(self) -> BlockingBroker:
        return connected_broker(self._options.address)


PAGE_BYTES = 1024 * 1024
"""The target size of a page: large enough to be efficient, small enough to bound memory if entries are large."""
_FIRST_PAGE = 64
MAX_ENTRIES_PER_GROUP = 1024
"""The maximum number of entries that one round trip reads from several ranges."""

RawEntries = list[Any]
OnGap = Callable[[str, Gap], None]
FirstPage = tuple[RawEntries, Gap | None, int]
"""A page, the gap before it, and the number of entries that were requested."""


def read_ranges(
    broker: BlockingBroker, entry_ranges: Sequence[Range], page_size: int, on_gap: OnGap
) -> Iterator[tuple[str, RawEntries]]:
    """Yields the streams and raw entries of the ranges, in order. Reads several small ranges in one round trip.

    The size of a group follows the entries that were read before it, as the size of a page does.
    """
    waiting = deque(entry_ranges)
    budget = min(_FIRST_PAGE, page_size)
    while waiting:
        group = [waiting.popleft()]
        requested = _first_size(group[0], page_size)
        while waiting and requested + _first_size(waiting[0], page_size) <= budget:
            requested += _first_size(waiting[0], page_size)
            group.append(waiting.popleft())
        first_pages: list[FirstPage | None] = [None]
        if len(group) > 1:
            first_pages = _first_pages(broker, group, page_size)
        largest_entry = 1
        for entry_range, first_page in zip(group, first_pages, strict=True):
            for page in read_range(broker, entry_range, page_size, on_gap, first_page):
                largest_entry = max(largest_entry, entry_bytes(page[0]), entry_bytes(page[-1]))
                yield entry_range.stream, page
        budget = max(1, min(2 * budget, MAX_ENTRIES_PER_GROUP, page_size, PAGE_BYTES // largest_entry))


def _first_size(entry_range: Range, page_size: int) -> int:
    return min(int(entry_range.weight) + 1, page_size)


def _first_pages(broker: BlockingBroker, group: Sequence[Range], page_size: int) -> list[FirstPage | None]:
    """The first page of each range, in one transaction; None for each on a cluster, which has no such transaction."""
    if broker.transport.features.cluster:
        return [None] * len(group)
    commands: list[Args] = []
    for entry_range in group:
        key = to_bytes(entry_range.stream)
        commands.append((b"XINFO", b"STREAM", key))
        commands.append(_page_args(key, entry_range.after, entry_range, _first_size(entry_range, page_size)))
    key = to_bytes(group[0].stream)
    replies = broker.transport.call_many(Batch(commands, key, atomic=True, repeatable=True))
    pages: list[FirstPage | None] = []
    for entry_range, info, page in zip(group, replies[::2], replies[1::2], strict=True):
        position = StreamPosition(entry_range.after, entry_range.added, entry_range.exact)
        pages.append((*_checked_page(entry_range, position, info, page), _first_size(entry_range, page_size)))
    return pages


def read_range(
    broker: BlockingBroker,
    entry_range: Range,
    page_size: int,
    on_gap: OnGap,
    first_page: FirstPage | None = None,
) -> Iterator[RawEntries]:
    """Yields raw entries with ``after < id <= upto``. Calls ``on_gap``, which may raise, for lost entries."""
    key = to_bytes(entry_range.stream)
    position = StreamPosition(entry_range.after, entry_range.added, entry_range.exact)
    size = min(_FIRST_PAGE, page_size)
    while True:
        if first_page is not None:
            page, gap, size = first_page
            first_page = None
        else:
            args = _page_args(key, position.id, entry_range, size)
            page, gap = broker.transport.call(Command(args, key, repeatable=True)), None
            if not page or page[0][0] != bytes(position.id):
                page, gap = _page_with_stream_info(broker, entry_range, args, position)
        if gap is not None:
            on_gap(entry_range.stream, _within_batch(gap, entry_range, position))
            position = position._replace(added=None)
        full = len(page) > size
        if page and page[0][0] == bytes(position.id):
            del page[0]
        if page:
            yield page
            added = None if position.added is None else position.added + len(page)
            position = StreamPosition(EntryId.parse(page[-1][0]), added, position.exact)
        if not full or position.id >= entry_range.upto:
            return
        size = _next_size(page, page_size) if page else size


def _page_args(key: bytes, after: EntryId, entry_range: Range, size: int) -> Args:
    """Reads ``size`` entries, and the entry ``after`` before them if it exists."""
    return (b"XRANGE", key, bytes(after), bytes(entry_range.upto), b"COUNT", b"%d" % (size + 1))


def _within_batch(gap: Gap, entry_range: Range, position: StreamPosition) -> Gap:
    """The gap without entries after the end of the batch: the driver counts those for the next batch."""
    if gap.lost is None or entry_range.max_lost is None or entry_range.added is None or position.added is None:
        return gap
    return gap._replace(lost=max(0, min(gap.lost, entry_range.added + entry_range.max_lost - position.added)))


def _page_with_stream_info(
    broker: BlockingBroker, entry_range: Range, args: Args, position: StreamPosition
) -> tuple[RawEntries, Gap | None]:
    """Reads the page and the stream's counts in one transaction.

    If the stream were trimmed between two separate commands, the loss would be counted wrongly or not at all.
    """
    key = to_bytes(entry_range.stream)
    replies = broker.transport.call_many(Batch([(b"XINFO", b"STREAM", key), args], key, atomic=True, repeatable=True))
    return _checked_page(entry_range, position, *replies)


def _checked_page(
    entry_range: Range, position: StreamPosition, info_reply: Any, page: Any
) -> tuple[RawEntries, Gap | None]:
    """The page, and the gap before it according to the stream's counts."""
    if isinstance(page, ErrorReply):
        raise typed_error(page)
    if page and page[0][0] == bytes(position.id):
        return page, None
    info = parse_stream_info(entry_range.stream, info_reply)
    if info is None or info.last_generated < entry_range.upto:
        stream, upto = entry_range.stream, entry_range.upto
        text = f"stream {stream!r} had entries up to {upto} and was deleted: they were possibly lost."
        return page, Gap(None, False, text)
    return page, gap_after(entry_range.stream, position, info)


def _next_size(page: RawEntries, page_size: int) -> int:
    """How many entries fit into PAGE_BYTES, estimated from the last page."""
    sample = page[:: max(1, len(page) // 16)]
    entry_size = sum(len(item[0]) + entry_bytes(item) for item in sample) // len(sample) + 1
    return max(1, min(page_size, PAGE_BYTES // entry_size))
