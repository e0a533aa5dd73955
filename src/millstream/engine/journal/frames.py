"""The frames of the journal, with checksums, and loading. One write appends one frame: a seal, then commands.

The seal is a PING whose argument is three numbers of eight hexadecimal digits: the length of the commands in bytes,
their CRC-32, and the CRC-32 of these two numbers. Each CRC continues the CRC of the previous frame, so that a missing
frame is detected too. The file is also valid input for a real Redis, which answers the PINGs and executes the commands.
See docs/decisions, number 5.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final
from zlib import crc32

import hiredis

from millstream.engine.effects import Effect
from millstream.engine.journal.files import Files
from millstream.errors import JournalCorrupt
from millstream.wire import ErrorReply, pack

if TYPE_CHECKING:
    from millstream.engine.engine import Engine


_MULTI: Final = pack((b"MULTI",))
_EXEC: Final = pack((b"EXEC",))


class Packer:
    """Encodes effects as commands, with a SELECT wherever the database changes."""

    __slots__ = ("database",)

    def __init__(self, database: int = 0) -> None:
        self.database = database

    def pack(self, units: Iterable[Sequence[Effect]]) -> bytes:
        pieces: list[bytes] = []
        add = pieces.append
        for unit in units:
            if len(unit) == 1:
                ((database, args),) = unit
                if database != self.database:
                    add(self._select(database))
                add(pack(args))
                continue
            add(_MULTI)
            for database, args in unit:
                if database != self.database:
                    add(self._select(database))
                add(pack(args))
            add(_EXEC)
        return b"".join(pieces)

    def _select(self, database: int) -> bytes:
        self.database = database
        return pack((b"SELECT", b"%d" % database))


HEAD: Final = pack((b"PING", b"millstream-journal-1"))
"""The first bytes of every journal: the format and its version."""
FIRST_CHAIN: Final = crc32(HEAD)
MAX_PAYLOAD: Final = 0xFFFF_FFFF

_SEAL_START: Final = b"*2\r\n$4\r\nPING\r\n$24\r\n"
SEAL_SIZE: Final = len(_SEAL_START) + 24 + 2


def seal(payload: bytes, chain: int) -> tuple[bytes, int]:
    """Returns the seal to write before ``payload``, and the next value of the CRC chain."""
    crc = crc32(payload, chain)
    numbers = b"%08x%08x" % (len(payload), crc)
    return b"%b%b%08x\r\n" % (_SEAL_START, numbers, crc32(numbers, chain)), crc


def _parse_seal(raw: bytes, chain: int) -> tuple[int, int] | None:
    """Returns the payload's length and CRC; None if the bytes are not a valid seal for this value of the chain."""
    numbers = raw[len(_SEAL_START) : -10]
    if raw != b"%b%b%08x\r\n" % (_SEAL_START, numbers, crc32(numbers, chain)):
        return None
    try:
        return int(numbers[:8], 16), int(numbers[8:], 16)
    except ValueError:
        return None


def _is_seal_prefix(written: bytes) -> bool:
    start, digits = written[: len(_SEAL_START)], written[len(_SEAL_START) :]
    if len(written) == SEAL_SIZE - 1:
        digits = digits.removesuffix(b"\r")
    return _SEAL_START.startswith(start) and (not digits or digits.isalnum())


class FrameReader:
    """Reads the frames of a journal once.

    After the iteration ``end`` is the byte after the last complete frame, ``chain`` is its CRC, and ``torn`` is true if
    an incomplete frame follows.

    An incomplete frame is one that an interrupted write can leave: shorter than its seal says, or ending in the zeros
    of blocks that did not reach the disk. Any other mismatch raises JournalCorrupt.
    """

    def __init__(self, file: IO[bytes], path: Path, size: int) -> None:
        self._file = file
        self._path = path
        self._size = size
        self.end = 0
        self.chain = FIRST_CHAIN
        self.torn = False

    @classmethod
    def resume(cls, file: IO[bytes], path: Path, size: int, *, end: int, chain: int) -> FrameReader:
        """Continues after a frame that ended at ``end`` with the CRC ``chain``."""
        reader = cls(file, path, size)
        reader.end, reader.chain = end, chain
        file.seek(end)
        return reader

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """Yields the offset and the payload of each frame."""
        if self.end == 0 and not self._read_head():
            return
        while self.end < self._size:
            payload = self._read_frame()
            if payload is None:
                self.torn = True
                return
            offset = self.end
            self.end += SEAL_SIZE + len(payload)
            yield offset, payload

    def _read_head(self) -> bool:
        head = self._file.read(min(len(HEAD), self._size))
        if head == HEAD:
            self.end = len(HEAD)
            return True
        if HEAD.startswith(head.rstrip(b"\0")) and self._is_truncated(head, len(HEAD)):
            self.torn = True
            return False
        raise self.corrupt(0, "it does not start with the header of this journal version")

    def _read_frame(self) -> bytes | None:
        bytes_left = self._size - self.end
        raw = self._file.read(min(SEAL_SIZE, bytes_left))
        parsed = _parse_seal(raw, self.chain)
        if parsed is None:
            if _is_seal_prefix(raw.rstrip(b"\0")) and self._is_truncated(raw, SEAL_SIZE):
                return None
            raise self.corrupt(self.end, "a frame's seal is damaged")
        length, crc = parsed
        payload = self._file.read(min(length, bytes_left - SEAL_SIZE))
        if len(payload) < length:
            return None
        if crc32(payload, self.chain) != crc:
            if self._is_truncated(payload, length):
                return None
            raise self.corrupt(self.end, "a frame's checksum does not match")
        self.chain = crc
        return payload

    def _is_truncated(self, last: bytes, whole: int) -> bool:
        """Whether the file ends with an incomplete write: too short, or with zeros in place of lost blocks.

        No frame ends with a zero. A single zero is not enough, because it may be one changed byte.
        """
        zeros = len(last) - len(last.rstrip(b"\0"))
        while chunk := self._file.read(1 << 20):
            if chunk.strip(b"\0"):
                return False
            zeros += len(chunk)
        return len(last) < whole or zeros > 1

    def corrupt(self, offset: int, problem: str) -> JournalCorrupt:
        return JournalCorrupt(
            f"the journal {self._path} is damaged at byte {offset}: {problem}. Nothing was loaded. Restore the file "
            f"from a backup, or discard all data after that byte with `truncate -s {offset} {self._path}`.",
            path=str(self._path),
            offset=offset,
        )


logger = logging.getLogger("millstream.journal")

_TRANSACTION_COMMANDS: Final = (b"MULTI", b"EXEC")
"""Skipped when loading, because a frame is complete or ignored. They are in the file for a Redis that reads it."""

_PARSER_CHUNK_BYTES: Final = 32 * 1024
"""The parser repeatedly moves its unread input to the front of its buffer. For a frame of megabytes in one chunk, that
would take quadratic time."""


@dataclass(frozen=True, slots=True)
class Loaded:
    end: int
    """The byte after the last complete frame, where writing continues."""
    chain: int
    database: int


def load_journal(engine: Engine, path: Path, files: Files, *, now_ms: int, up_to: int | None = None) -> Loaded:
    """Executes the journal, or its first ``up_to`` bytes, on an empty engine.

    Ignores an incomplete last frame, with a warning. Raises JournalCorrupt for other damage; the engine must then not
    be used.
    """
    size = files.size(path) if up_to is None else up_to
    if not size:
        return Loaded(0, FIRST_CHAIN, 0)
    session = engine.session(trusted=True)
    recording, engine.recording, engine.loading = engine.recording, False, True
    try:
        with files.read(path) as file:
            reader = FrameReader(file, path, size)
            for offset, payload in reader:
                for args in _commands(reader, offset, payload):
                    reply = engine.execute(session, args, now_ms)
                    if type(reply) is ErrorReply:
                        start = b" ".join(args[:3]).decode("utf-8", "backslashreplace")
                        raise reader.corrupt(offset, f"{start!r} failed with {reply.text!r}")
    finally:
        engine.recording, engine.loading = recording, False
        database = session.db.index
        engine.drop(session)
        engine.take_units()
        engine.take_outbox()
    if reader.torn:
        logger.warning(
            "the journal %s ends with an incomplete frame: truncated to %d bytes, %d bytes dropped.",
            path,
            reader.end,
            size - reader.end,
        )
    return Loaded(reader.end, reader.chain, database)


def _commands(reader: FrameReader, offset: int, payload: bytes) -> Iterator[list[bytes]]:
    parser = hiredis.Reader()
    for start in range(0, len(payload), _PARSER_CHUNK_BYTES):
        parser.feed(payload[start : start + _PARSER_CHUNK_BYTES])
        while (args := parser.gets()) is not False:
            if type(args) is not list or not args:
                raise reader.corrupt(offset, "a frame contains data that is not a command")
            if args[0] not in _TRANSACTION_COMMANDS:
                yield args
    if parser.has_data():
        raise reader.corrupt(offset, "a frame ends inside a command")
