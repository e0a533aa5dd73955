"""Sends segments to the tasks inside their input partitions, for executors that cannot read the driver's files.

A partition contains compressed segments. A batch of the log is limited to ``MAX_LOG_BYTES``, except for a single larger
transaction: its events must stay in one partition, because partitions have no order. Rows of a snapshot have no order,
so a chunk is split into partitions of ``MAX_ROWS_BYTES``.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

import numpy as np

from millstream.cdc.database import ChangeDatabase
from millstream.cdc.errors import SourceRefused
from millstream.cdc.read_ahead import LogRange
from millstream.cdc.segments import Segment, parse_segment, parts_of, read_segment, segment_sections
from millstream.cdc.snapshot import ChunkPlan, SnapshotPlan, chunk_name
from millstream.storage import Storage

MAX_LOG_BYTES = 32 << 20
MAX_ROWS_BYTES = 32 << 20
MAX_CHUNKS_PER_BATCH = 8
"""The driver reads the chunks of a batch, and all of them are in memory at the same time."""
_MAX_PACKED_BYTES = 1 << 30
_PARALLEL_CHUNKS = 4
_FASTEST = 1


@dataclass(frozen=True, slots=True)
class PackedRows:
    """A part of a chunk, whose first row has the number ``first`` in the chunk."""

    content: bytes
    first: int


def pack_log(ranges: Sequence[LogRange], after: int, upto: int) -> tuple[bytes, ...]:
    """The transactions that end in ``(after, upto]``. Raises SourceRefused if they are too large for a partition."""
    packed = tuple(content for log_range in ranges for content in _pack_range(log_range, after, upto))
    if sum(map(len, packed)) > _MAX_PACKED_BYTES:
        raise SourceRefused(
            f"one transaction has {sum(map(len, packed)):,} bytes after compression, and a partition can have "
            f"{_MAX_PACKED_BYTES:,}. Run the pipeline with a local master until this transaction is processed."
        )
    return packed


def _pack_range(log_range: LogRange, after: int, upto: int) -> Iterator[bytes]:
    if len(log_range.files) > 1:  # one large transaction is in several files
        for path in log_range.files:
            yield zlib.compress(path.read_bytes(), _FASTEST)
        return
    segment, commits = read_segment(log_range.files[0]), log_range.commits
    first, last = np.searchsorted(commits.positions, (after, upto), side="right").tolist()
    if first >= last:
        return
    begin, end = int(commits.sizes[first - 1]) if first else 0, int(commits.sizes[last - 1])
    first_message, last_message = np.searchsorted(segment.starts, (begin, end)).tolist()
    yield _pack(segment, first_message, last_message)


def _pack(segment: Segment, first: int, last: int) -> bytes:
    """Some consecutive messages of a segment, as a segment."""
    starts, ends = segment.starts[first:last], segment.ends[first:last]
    body = segment.body[int(starts[0]) : int(ends[-1])] if len(starts) else segment.body[:0]
    lengths = array("I", (ends - starts).astype(np.uint32).tobytes())
    compressor = zlib.compressobj(_FASTEST)
    sections = segment_sections(body.tobytes(), lengths, segment.metadata)
    return b"".join([*map(compressor.compress, sections), compressor.flush()])


def unpack(content: bytes) -> Segment:
    return parse_segment(np.frombuffer(zlib.decompress(content), dtype=np.uint8), "a segment in an input partition")


def pack_chunks(
    database: ChangeDatabase, storage: Storage, directory: Path, plan: SnapshotPlan, indices: Sequence[int]
) -> Iterator[tuple[int, list[PackedRows]]]:
    """Reads the chunks that are not stored yet, and packs their rows. Runs on the driver, with several connections.

    A chunk is stored before it is packed, so that a replayed batch has the same rows. ``directory`` is for temporary
    files.
    """

    def load(index: int) -> list[PackedRows]:
        chunk = plan.chunk(index)
        assert chunk is not None, "truncations have no chunk"
        segment = _load_chunk(database, storage, directory, chunk, chunk_name(plan.generation, index))
        parts = [
            PackedRows(_pack(part, 0, len(part.starts)), first) for first, part in parts_of(segment, MAX_ROWS_BYTES)
        ]
        return parts or [PackedRows(_pack(segment, 0, 0), 0)]

    with ThreadPoolExecutor(_PARALLEL_CHUNKS, "millstream-chunk") as pool:
        yield from zip(indices, pool.map(load, indices), strict=True)


def _load_chunk(database: ChangeDatabase, storage: Storage, directory: Path, chunk: ChunkPlan, name: str) -> Segment:
    if storage.is_local:
        path = Path(storage.location, name)
        if not path.exists():
            database.read_chunk(path, chunk)
        return read_segment(path)
    if not storage.exists(name):
        path = directory / f".{name}.{token_hex(6)}"
        try:
            database.read_chunk(path, chunk)
            storage.create(name, path.read_bytes())
        finally:
            path.unlink(missing_ok=True)
    return parse_segment(np.frombuffer(storage.read(name), dtype=np.uint8), storage.uri(name))
