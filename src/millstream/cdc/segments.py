"""Raw messages on disk, many in a file: what a session spools, what a task decodes, what a chunk of a snapshot is.

A file holds the messages side by side, then their lengths, then marks (where a batch may end), then facts as JSON, then
a closing that says how long each part is. It appears whole under its name or not at all: it is written beside, synced,
and linked. A name is taken once; who comes second finds the first one's file and uses it.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

import numpy as np
import numpy.typing as npt

from millstream.cdc.errors import SegmentDamaged

SUFFIX = ".seg"
_CLOSING = struct.Struct("<QQQQ8s")
_MAGIC = b"MSTREAM1"

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Marks:
    """Places in the log between which batches are cut: ``positions[i]`` is reached after ``changes[i]`` changes and
    ``sizes[i]`` bytes, counted from the file's beginning."""

    positions: Numbers
    changes: Numbers
    sizes: Numbers


@dataclass(frozen=True, slots=True)
class Segment:
    """``body`` is the whole file, so that a look at four bytes near the last message's end stays inside it."""

    body: Bytes
    starts: Numbers
    ends: Numbers
    facts: dict[str, Any]


def write_segment(
    path: Path,
    body: bytes | bytearray | memoryview,
    lengths: array[int],
    facts: Mapping[str, Any],
    marks: Sequence[array[int]] = (),
) -> bool:
    """Whether the file is now there by this call; false where somebody was first, whose file is left alone."""
    told = json.dumps(facts, separators=(",", ":")).encode()
    numbers = b"".join(np.asarray(mark, dtype="<i8").tobytes() for mark in marks)
    count = len(marks[0]) if marks else 0
    beside = path.with_name(f".{path.name}.{token_hex(6)}")
    with beside.open("xb") as file:
        file.write(body)
        file.write(np.asarray(lengths, dtype="<u4").tobytes())
        file.write(numbers)
        file.write(told)
        file.write(_CLOSING.pack(len(body), len(lengths), count, len(told), _MAGIC))
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(beside, path)
    except FileExistsError:
        return False
    finally:
        os.unlink(beside)
    return True


def read_segment(path: Path) -> Segment:
    """Mapped, not copied. Raises SegmentDamaged where the file is not one of ours, or not whole."""
    whole = _mapped(path)
    body_size, count, _, told, at = _parts(path, whole)
    lengths = np.frombuffer(whole, dtype="<u4", count=count, offset=body_size).astype(np.int64)
    ends = np.cumsum(lengths)
    if count and int(ends[-1]) != body_size:
        raise SegmentDamaged(str(path), "its messages are not as long as it says")
    return Segment(whole, ends - lengths, ends, json.loads(bytes(whole[at : at + told])))


def read_marks(path: Path) -> Marks:
    """The marks alone: the driver plans with them, and reads no message."""
    whole = _mapped(path)
    body_size, count, marks, _, _ = _parts(path, whole)
    found = np.frombuffer(whole, dtype="<i8", count=3 * marks, offset=body_size + 4 * count).astype(np.int64)
    return Marks(found[:marks], found[marks : 2 * marks], found[2 * marks :])


def read_facts(path: Path) -> dict[str, Any]:
    whole = _mapped(path)
    _, _, _, told, at = _parts(path, whole)
    found: dict[str, Any] = json.loads(bytes(whole[at : at + told]))
    return found


def _mapped(path: Path) -> Bytes:
    try:
        # As a plain array: each index into a memmap makes another one, which costs more than the look itself.
        return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    except ValueError as error:  # an empty file cannot be mapped
        raise SegmentDamaged(str(path), "it is empty") from error


def _parts(path: Path, whole: Bytes) -> tuple[int, int, int, int, int]:
    """The sizes of body, lengths, marks and facts, and where the facts begin."""
    if len(whole) < _CLOSING.size:
        raise SegmentDamaged(str(path), "it is too short")
    body, count, marks, told, magic = _CLOSING.unpack(bytes(whole[-_CLOSING.size :]))
    at = body + 4 * count + 24 * marks
    if magic != _MAGIC or at + told + _CLOSING.size != len(whole):
        raise SegmentDamaged(str(path), "its closing is not what was written")
    return body, count, marks, told, at


def pin_json(path: Path, value: Mapping[str, Any]) -> dict[str, Any]:
    """Writes a small document once; answers what is there, which may be an earlier one's."""
    beside = path.with_name(f".{path.name}.{token_hex(6)}")
    with beside.open("x", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    try:
        with contextlib.suppress(FileExistsError):
            os.link(beside, path)
    finally:
        os.unlink(beside)
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def byte_view(body: Bytes, kind: str) -> npt.NDArray[Any]:
    """The buffer as overlapping numbers, one beginning at every byte: an index picks those that are wanted."""
    width = np.dtype(kind).itemsize
    return np.ndarray((max(0, len(body) - width + 1),), dtype=kind, buffer=body, strides=(1,))
