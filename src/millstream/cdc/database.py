"""What a database must bring to be followed: everything else (planner, reader, spool, frame) is shared.

An implementation holds options alone, so that it travels to the tasks as a pickle; connections are made where they are
used. It raises SourceRefused, SourceUnreachable and PositionLost, each in words that say what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from millstream.cdc.decoding import Decoding
from millstream.cdc.offsets import ChangeOffset
from millstream.cdc.options import FollowOptions
from millstream.cdc.segments import Numbers, Segment
from millstream.cdc.session import ChangeSession
from millstream.cdc.snapshot import ChunkPlan
from millstream.cdc.spool import Count, LogSpool
from millstream.cdc.visibility import SeenTable


class ChangeDatabase(Protocol):
    @property
    def options(self) -> FollowOptions: ...

    @property
    def count(self) -> Count | None:
        """How changes in messages are counted; None: a message is a change."""

    # --- on the driver ----------------------------------------------------------------------------------------------

    def begin(self) -> ChangeOffset:
        """Looks at the database, makes what was asked for, and answers where its log begins for us. Refuses before
        anything is made."""

    def resume(self, start: ChangeOffset) -> list[str]:
        """Whether what follows ``start`` can be had, on the same server; the full names of the tables that are
        followed."""

    def session(self, spool: LogSpool, start: ChangeOffset, met: Callable[[str], None]) -> ChangeSession:
        """Not started yet. ``met`` is told the full name of a followed table before any change of it is spooled."""

    def log_end(self) -> int:
        """How far the log is written now."""

    def mark(self, files: Sequence[Path], position: int) -> str:
        """What the log calls the transaction that ends at ``position``, so that it is known again; may be empty.
        ``files`` hold it."""

    def cut_tables(self, names: Collection[str] | None, must_see: Mapping[str, int]) -> list[dict[str, Any]]:
        """How tables (None: all that are followed) are cut into chunks: ``schema``, ``table``, ``key``, ``bounds``,
        and what else ``read_chunk`` needs. Each chunk must have seen the transaction in ``must_see``."""

    # --- in the tasks -----------------------------------------------------------------------------------------------

    def read_chunk(self, path: Path, chunk: ChunkPlan) -> None:
        """Reads a chunk in a transaction of its own and writes it as a segment, with what it saw in the facts
        ``snapshot``, ``position`` and ``ts_ms``."""

    def locate(self, table: SeenTable, keys: list[pa.Array]) -> Numbers:
        """Which chunk each key belongs to, by the server's own order."""

    def decoding(self) -> Decoding:
        """How changes are told, for the lane that takes all of them."""

    def decode_changes(self, segment: Segment, how: Decoding) -> pa.RecordBatch: ...

    def decode_chunk(self, segment: Segment, how: Decoding, name: str) -> pa.RecordBatch | None:
        """None: the table was dropped before the chunk was read."""
