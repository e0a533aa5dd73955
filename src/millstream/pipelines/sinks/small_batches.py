"""Writes small batches to Redis from the driver.

A write through Spark starts three Python calls of its own (create the sink, create the writer, commit) and a second
Python worker for the task. For a few rows that is most of a batch's time. The driver runs the same writer as the task
would, with the same identity, so a batch that is written again, either way, adds nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Final

from millstream.errors import BrokerUnavailable, MillstreamError
from millstream.spark.sink_options import Delivered, sink_targets

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

MAX_ROWS: Final = 1_000
MAX_TEXT_BYTES: Final = 16 << 10
"""Of each value: bounds the memory of the driver."""
_IS_LARGE: Final = "_is_large"

log = logging.getLogger("millstream.pipelines")


class SmallBatches:
    """Decides, for one sink, which batches the driver writes. A batch is probably small if the previous one was."""

    def __init__(self) -> None:
        self._previous: int | None = None
        """Rows of the previous batch; None: unknown, or its write failed."""
        self._columns: dict[tuple[tuple[str, str], ...], list[Column]] = {}

    def write(self, rows: DataFrame, options: Mapping[str, str]) -> bool:
        """Writes the batch if it is small and has one partition. ``options`` are those of a batch write. Returns False
        if Spark must write it; then none of it is stored, or what is stored will be recognized.

        Call it only for rows that nothing observes: Spark evaluates some of them even if the result is False.
        """
        previous, self._previous = self._previous, None
        if previous is None or previous > MAX_ROWS or _partitions(rows) != 1:
            return False
        from millstream.spark.writer import RedisStreamsBatchWriter

        table = rows.select(*self._bounded(rows)).limit(MAX_ROWS + 1).toArrow()
        is_large = table.column(_IS_LARGE).to_pylist()
        if len(is_large) > MAX_ROWS or any(is_large):
            return False
        table = table.drop_columns([_IS_LARGE])
        writer = RedisStreamsBatchWriter(sink_targets(options, streaming=False), table.schema, "")
        try:
            writer.commit([writer.write_partition(table.to_batches(), 0)])
        except BrokerUnavailable:
            raise
        except MillstreamError as error:
            # Spark's write of the same rows reports the error in the form that retries and dead letters expect.
            log.debug("a small batch was not written from the driver: %s", error)
            return False
        return True

    def written(self, delivered: Delivered) -> None:
        self._previous = delivered.rows

    def _bounded(self, rows: DataFrame) -> Sequence[Column]:
        """The columns, without values that are too large, and whether there is one. Made once for each schema: each
        expression is several calls into the JVM."""
        from pyspark.sql import functions as F

        kinds = tuple(rows.dtypes)
        if kinds not in self._columns:
            texts = [name for name, kind in kinds if kind == "string"]
            is_large = reduce(
                or_, (F.coalesce(F.octet_length(name) > MAX_TEXT_BYTES, F.lit(False)) for name in texts), F.lit(False)
            )
            self._columns[kinds] = [
                *(F.when(~is_large, F.col(name)).alias(name) if name in texts else F.col(name) for name, _ in kinds),
                is_large.alias(_IS_LARGE),
            ]
        return self._columns[kinds]


def _partitions(rows: DataFrame) -> int:
    return int(rows._jdf.queryExecution().toRdd().getNumPartitions())
