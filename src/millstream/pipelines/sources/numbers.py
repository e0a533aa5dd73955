"""The generator's Spark data source: row numbers and times. Everything else is an expression.

Spark calls ``DataSource`` and the planning methods of the reader on the driver, ``read`` on the executors.
An offset has all that a replay needs: the number of rows, when the first was due, and the number of parts of a batch.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

FORMAT = "millstream_numbers"
_CHUNK = 50_000


class NumberRange(InputPartition):
    def __init__(self, first: int, last: int, start_ms: int, per_second: float) -> None:
        self.first, self.last, self.start_ms, self.per_second = first, last, start_ms, per_second


class Numbers(DataSource):
    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        return "n bigint, ts_ms bigint"

    def streamReader(self, schema: Any) -> NumbersReader:  # noqa: N802, RUF100  # Spark's name
        return NumbersReader(dict(self.options))


class NumbersReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: dict[str, str]) -> None:
        by_name = {name.lower(): value for name, value in options.items()}
        self._rows = int(by_name["rows"]) if "rows" in by_name else None
        self._rate = float(by_name["rate"]) if "rate" in by_name else None
        self._spacing = self._rate or float(by_name.get("persecond", "1000"))
        self._start_ms = int(by_name["startms"]) if "startms" in by_name else None
        self._max_rows = int(by_name.get("maxrows", "100000"))
        self._parts = int(by_name.get("parts", "2"))
        self._frozen_at: int | None = None

    def initialOffset(self) -> dict[str, int]:  # noqa: N802, RUF100  # Spark's name
        start = self._start_ms if self._start_ms is not None else _now_ms()
        # Rows are due from now on even if the events' times start elsewhere: the rate is by the wall clock.
        return {"n": 0, "start_ms": start, "since_ms": _now_ms(), "parts": self._parts}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802, RUF100  # Spark's name
        return ReadMaxRows(self._max_rows)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802, RUF100  # Spark's name
        self._frozen_at = _now_ms()

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802, RUF100  # Spark's name
        max_rows = None if isinstance(limit, ReadAllAvailable) else getattr(limit, "max_rows", self._max_rows)
        end = due(start["n"], self._rows, self._rate, (self._frozen_at or _now_ms()) - start["since_ms"], max_rows)
        # The same offset if nothing is due: any other would start an empty batch.
        return start if end <= start["n"] else {**start, "n": end, "parts": self._parts}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[NumberRange]:
        cuts = split(start["n"], end["n"], end["parts"])
        return [NumberRange(first, last, end["start_ms"], self._spacing) for first, last in cuts]

    def read(self, partition: NumberRange) -> Iterator[pa.RecordBatch]:  # type: ignore[override]  # our own partition
        import numpy as np

        for first in range(partition.first, partition.last, _CHUNK):
            n = np.arange(first, min(first + _CHUNK, partition.last), dtype=np.int64)
            ts = partition.start_ms + (n * (1000.0 / partition.per_second)).astype(np.int64)
            yield pa.RecordBatch.from_arrays([pa.array(n), pa.array(ts)], names=["n", "ts_ms"])


def due(start: int, rows: int | None, rate: float | None, elapsed_ms: int, max_rows: int | None) -> int:
    """The number of rows that may exist now: limited by the clock, the total and the batch."""
    end = start + (max_rows if max_rows is not None else 1_000_000) if rate is None else int(elapsed_ms * rate / 1000)
    if rows is not None:
        end = min(end if rate is not None or max_rows is not None else rows, rows)
    return max(start, end if max_rows is None else min(end, start + max_rows))


def split(first: int, last: int, parts: int) -> list[tuple[int, int]]:
    """[first, last) in ``parts`` even pieces without empty ones: a pure function of the two offsets."""
    total = last - first
    edges = [first + total * i // parts for i in range(parts + 1)]
    return [(a, b) for a, b in itertools.pairwise(edges) if a < b]


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
