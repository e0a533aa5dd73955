"""What a write was: measured in the tasks as rows pass, added up when all of them are done, told in a file.

Spark hands a writer's count back to nobody, and an observation of its own slows a write down (decision 9).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import reduce
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from millstream.spark.entries import Mapping, is_text
from millstream.spark.errors import InvalidOption


class Measured(NamedTuple):
    """``bytes`` of the values; ``oldest`` and ``newest``: None where no row has a time."""

    rows: int = 0
    bytes: int = 0
    oldest: int | None = None
    newest: int | None = None

    def plus(self, other: Measured) -> Measured:
        return Measured(
            self.rows + other.rows,
            self.bytes + other.bytes,
            min((time for time in (self.oldest, other.oldest) if time is not None), default=None),
            max((time for time in (self.newest, other.newest) if time is not None), default=None),
        )


class Meter:
    """Measures batches as they pass. Pickles: made on the driver, used in the tasks."""

    def __init__(self, schema: pa.Schema, mapping: Mapping, time_column: str | None) -> None:
        """Raises InvalidOption where ``timeColumn`` is no column of whole numbers."""
        self._time = time_column
        if self._time is not None:
            if self._time not in schema.names:
                raise InvalidOption("timeColumn", self._time, "the name of a column of this query")
            if not pa.types.is_integer(schema.field(self._time).type):
                kind = schema.field(self._time).type
                raise InvalidOption("timeColumn", f"{self._time} {kind}", "a column of whole numbers, such as BIGINT")
        value = mapping.value_column()
        self._text = value if value is not None and is_text(schema.field(value).type) else None

    def over(self, batches: Iterable[pa.RecordBatch], seen: list[Measured]) -> Iterator[pa.RecordBatch]:
        """The batches; what each of them was goes into ``seen``."""
        for batch in batches:
            seen.append(self._measured(batch))
            yield batch

    def _measured(self, batch: pa.RecordBatch) -> Measured:
        size = 0 if self._text is None else pc.sum(pc.binary_length(batch.column(self._text))).as_py() or 0
        if self._time is None:
            return Measured(batch.num_rows, size)
        ends = pc.min_max(batch.column(self._time)).as_py()
        return Measured(batch.num_rows, size, ends["min"], ends["max"])


def total(parts: Iterable[Measured]) -> Measured:
    return reduce(Measured.plus, parts, Measured())


def tell(path: str, parts: Iterable[Measured]) -> None:
    """Before the write returns: whoever waits for that finds the whole file."""
    Path(path).write_text(json.dumps(total(parts)._asdict()))


def read(path: str) -> Measured:
    return Measured(**json.loads(Path(path).read_text()))
