"""Segment files: raw messages of the change log, or rows of a snapshot chunk.

A file consists of the concatenated messages, their lengths, the commits (where a batch may end), metadata as JSON, and
a footer with the size of each section. It is written under a temporary name, synced, and linked to its final name, so
it is either complete or absent. A name is created once: a second writer leaves the existing file as it is.
"""

from __future__ import annotations

import json
import os
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from secrets import token_hex
from typing import Any

import numpy as np
import numpy.typing as npt

from millstream.cdc.errors import SegmentDamaged
from millstream.storage import Storage

SUFFIX = ".seg"
_CLOSING = struct.Struct("<QQQQ8s")
PART_BYTES = 256 << 20
_BEYOND = 16
"""Readers read up to this many bytes past a message's end. At the end of a file these bytes are its footer."""
_MAGIC = b"MSTREAM1"

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]
Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Commits:
    """The commits in a segment, where a batch may end: ``positions[i]`` is reached after ``changes[i]`` changes and
    ``sizes[i]`` bytes, counted from the start of the range."""

    positions: Numbers
    changes: Numbers
    sizes: Numbers


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment in memory. ``body`` is the whole file, so that reading four bytes near the end of the last message
    stays inside it."""

    body: Bytes
    starts: Numbers
    ends: Numbers
    metadata: dict[str, Any]


def write_segment(
    path: Path,
    body: Buffer,
    lengths: array[int],
    metadata: Mapping[str, Any],
    commits: Sequence[array[int]] = (),
) -> bool:
    """Writes a segment. Returns False if the file already exists; the existing file is not changed."""
    temporary = path.with_name(f".{path.name}.{token_hex(6)}")
    try:
        with temporary.open("wb") as file:
            for section in segment_sections(body, lengths, metadata, commits):
                file.write(section)
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)  # also after an error: on a full disk it would keep the space
    return True


def segment_sections(
    body: Buffer, lengths: array[int], metadata: Mapping[str, Any], commits: Sequence[array[int]] = ()
) -> tuple[Buffer, ...]:
    """The sections of a segment file, in their order."""
    encoded_metadata = json.dumps(metadata, separators=(",", ":")).encode()
    numbers = b"".join(np.asarray(column, dtype="<i8").tobytes() for column in commits)
    count = len(commits[0]) if commits else 0
    footer = _CLOSING.pack(len(body), len(lengths), count, len(encoded_metadata), _MAGIC)
    return body, np.asarray(lengths, dtype="<u4").tobytes(), numbers, encoded_metadata, footer


def read_segment(path: Path) -> Segment:
    """Maps a segment into memory. Raises SegmentDamaged if the file is not a complete segment."""
    return parse_segment(_mapped(path), str(path))


def parse_segment(content: Bytes, name: str) -> Segment:
    """A segment from the bytes of its file. ``name`` is for errors."""
    body_size, count, _, metadata_size, at = _parts(name, content)
    lengths = np.frombuffer(content, dtype="<u4", count=count, offset=body_size).astype(np.int64)
    ends = np.cumsum(lengths)
    if count and int(ends[-1]) != body_size:
        raise SegmentDamaged(name, "its messages are not as long as it says")
    return Segment(content, ends - lengths, ends, json.loads(bytes(content[at : at + metadata_size])))


def parts_of(segment: Segment, max_bytes: int | None = None) -> Iterator[tuple[int, Segment]]:
    """Splits a segment into parts that Arrow's 32-bit offsets can address, each with the number of its first message.
    A message that is larger than ``max_bytes`` (``PART_BYTES``) is a part by itself."""
    first, count = 0, len(segment.starts)
    limit = PART_BYTES if max_bytes is None else max_bytes
    while first < count:
        start = int(segment.starts[first])
        last = max(first + 1, int(np.searchsorted(segment.ends, start + limit, side="right")))
        body = segment.body[start : int(segment.ends[last - 1]) + _BEYOND]
        starts, ends = segment.starts[first:last] - start, segment.ends[first:last] - start
        yield first, replace(segment, body=body, starts=starts, ends=ends)
        first = last


def read_commits(path: Path) -> Commits:
    """The commits of a segment, which the driver plans with. Reads no messages."""
    content = _mapped(path)
    body_size, count, commits, _, _ = _parts(str(path), content)
    columns = np.frombuffer(content, dtype="<i8", count=3 * commits, offset=body_size + 4 * count).astype(np.int64)
    return Commits(columns[:commits], columns[commits : 2 * commits], columns[2 * commits :])


def read_metadata(path: Path) -> dict[str, Any]:
    content = _mapped(path)
    _, _, _, metadata_size, at = _parts(str(path), content)
    metadata: dict[str, Any] = json.loads(bytes(content[at : at + metadata_size]))
    return metadata


def _mapped(path: Path) -> Bytes:
    try:
        # A plain array: each index into a memmap creates another memmap, which costs more than the access itself.
        return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    except ValueError as error:  # an empty file cannot be mapped
        raise SegmentDamaged(str(path), "it is empty") from error


def _parts(name: str, content: Bytes) -> tuple[int, int, int, int, int]:
    """The sizes of body, lengths, commits and metadata, and the offset of the metadata."""
    if len(content) < _CLOSING.size:
        raise SegmentDamaged(name, "it is too short")
    body, count, commits, metadata_size, magic = _CLOSING.unpack(bytes(content[-_CLOSING.size :]))
    at = body + 4 * count + 24 * commits
    if magic != _MAGIC or at + metadata_size + _CLOSING.size != len(content):
        raise SegmentDamaged(name, "its footer does not match its size")
    return body, count, commits, metadata_size, at


def read_stored_metadata(storage: Storage, name: str) -> dict[str, Any]:
    """The metadata of a segment in the storage. Reads the end of the object only. Raises ObjectMissing."""
    size = storage.size(name)
    if size < _CLOSING.size:
        storage.read(name, 0, 1)  # raises ObjectMissing if it does not exist
        raise SegmentDamaged(storage.uri(name), "it is too short")
    body, count, commits, metadata_size, magic = _CLOSING.unpack(storage.read(name, size - _CLOSING.size))
    at = body + 4 * count + 24 * commits
    if magic != _MAGIC or at + metadata_size + _CLOSING.size != size:
        raise SegmentDamaged(storage.uri(name), "its footer does not match its size")
    metadata: dict[str, Any] = json.loads(storage.read(name, at, metadata_size))
    return metadata


def write_json_once(storage: Storage, name: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """Writes a small document unless it exists. Returns the stored document, which may be an earlier one."""
    storage.create(name, json.dumps(value).encode())
    return read_json(storage, name)


def replace_json(storage: Storage, name: str, value: Mapping[str, Any]) -> None:
    """Replaces a small document atomically."""
    storage.write(name, json.dumps(value).encode())


def read_json(storage: Storage, name: str) -> dict[str, Any]:
    """Raises ObjectMissing."""
    document: dict[str, Any] = json.loads(storage.read(name))
    return document


def byte_view(body: Bytes, kind: str) -> npt.NDArray[Any]:
    """A view of the buffer as overlapping numbers, one starting at each byte."""
    width = np.dtype(kind).itemsize
    return np.ndarray((max(0, len(body) - width + 1),), dtype=kind, buffer=body, strides=(1,))
