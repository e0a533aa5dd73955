"""How the journal's bytes are guarded, and loaded. A frame is what was written in one go: a seal, then commands.

The seal is a PING whose argument is three numbers of eight hexadecimal digits: how many bytes of commands follow, their
CRC-32 (begun with the CRC of the frame before, so that a frame that is missing is found too), and the CRC of these two.
A real Redis that is fed with the file answers the PINGs and takes the commands. See docs/decisions, number 5.
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
    """Remembers which database the bytes so far have selected."""

    __slots__ = ("database",)

    def __init__(self, database: int = 0) -> None:
        self.database = database

    def pack(self, units: Iterable[Sequence[Effect]]) -> bytes:
        pieces: list[bytes] = []
        add = pieces.append
        for unit in units:
            if len(unit) == 1:
                ((database, words),) = unit
                if database != self.database:
                    add(self._select(database))
                add(pack(words))
                continue
            add(_MULTI)
            for database, words in unit:
                if database != self.database:
                    add(self._select(database))
                add(pack(words))
            add(_EXEC)
        return b"".join(pieces)

    def _select(self, database: int) -> bytes:
        self.database = database
        return pack((b"SELECT", b"%d" % database))


HEAD: Final = pack((b"PING", b"millstream-journal-1"))
"""The first bytes of every journal: what it is, and in which version."""
FIRST_CHAIN: Final = crc32(HEAD)
MAX_PAYLOAD: Final = 0xFFFF_FFFF

_SEAL_START: Final = b"*2\r\n$4\r\nPING\r\n$24\r\n"
SEAL_SIZE: Final = len(_SEAL_START) + 24 + 2


def seal(payload: bytes, chain: int) -> tuple[bytes, int]:
    """The seal to be written before ``payload``, and the chain's next value."""
    crc = crc32(payload, chain)
    numbers = b"%08x%08x" % (len(payload), crc)
    return b"%b%b%08x\r\n" % (_SEAL_START, numbers, crc32(numbers, chain)), crc


def _open_seal(raw: bytes, chain: int) -> tuple[int, int] | None:
    """The payload's length and CRC; None if these bytes are not a seal at this place of the chain."""
    numbers = raw[len(_SEAL_START) : -10]
    if raw != b"%b%b%08x\r\n" % (_SEAL_START, numbers, crc32(numbers, chain)):
        return None
    try:
        return int(numbers[:8], 16), int(numbers[8:], 16)
    except ValueError:
        return None


def _begins_a_seal(written: bytes) -> bool:
    start, digits = written[: len(_SEAL_START)], written[len(_SEAL_START) :]
    if len(written) == SEAL_SIZE - 1:
        digits = digits.removesuffix(b"\r")
    return _SEAL_START.startswith(start) and (not digits or digits.isalnum())


class FrameReader:
    """Goes through a journal once. Afterwards ``end`` is the byte after the last whole frame, ``chain`` its CRC, and
    ``torn`` says whether something follows that a crash cut off in mid-write.

    A torn tail is one that could come from a write that was cut short: less than the seal promises, or nothing but the
    zeros of blocks that never reached the disk. Whatever else does not fit is JournalCorrupt.
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
        """Goes on behind a frame that ended at ``end`` with the CRC ``chain``."""
        reader = cls(file, path, size)
        reader.end, reader.chain = end, chain
        file.seek(end)
        return reader

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """Each frame's offset and its payload."""
        if self.end == 0 and not self._head():
            return
        while self.end < self._size:
            payload = self._frame()
            if payload is None:
                self.torn = True
                return
            offset = self.end
            self.end += SEAL_SIZE + len(payload)
            yield offset, payload

    def _head(self) -> bool:
        head = self._file.read(min(len(HEAD), self._size))
        if head == HEAD:
            self.end = len(HEAD)
            return True
        if HEAD.startswith(head.rstrip(b"\0")) and self._cut_short(head, len(HEAD)):
            self.torn = True
            return False
        raise self.corrupt(0, "it does not begin as a journal of this version does")

    def _frame(self) -> bytes | None:
        left = self._size - self.end
        raw = self._file.read(min(SEAL_SIZE, left))
        found = _open_seal(raw, self.chain)
        if found is None:
            if _begins_a_seal(raw.rstrip(b"\0")) and self._cut_short(raw, SEAL_SIZE):
                return None
            raise self.corrupt(self.end, "a frame's seal is damaged")
        length, crc = found
        payload = self._file.read(min(length, left - SEAL_SIZE))
        if len(payload) < length:
            return None
        if crc32(payload, self.chain) != crc:
            if self._cut_short(payload, length):
                return None
            raise self.corrupt(self.end, "a frame's checksum does not match")
        self.chain = crc
        return payload

    def _cut_short(self, last: bytes, whole: int) -> bool:
        """Whether the file ends here before it should: too early, or with the zeros of blocks that a power cut kept
        from the disk. Nothing that we write ends with a zero; one alone is not enough, it may be a changed byte."""
        zeros = len(last) - len(last.rstrip(b"\0"))
        while more := self._file.read(1 << 20):
            if more.strip(b"\0"):
                return False
            zeros += len(more)
        return len(last) < whole or zeros > 1

    def corrupt(self, offset: int, what: str) -> JournalCorrupt:
        return JournalCorrupt(
            f"the journal {self._path} is damaged at byte {offset}: {what}. Nothing was loaded. Restore the file "
            f"from a backup, or give up what was written after that byte with `truncate -s {offset} {self._path}`.",
            path=str(self._path),
            offset=offset,
        )


logger = logging.getLogger("millstream.journal")

_BRACKETS: Final = (b"MULTI", b"EXEC")
"""Needless here, since a frame is there as a whole or not at all; a Redis that is fed with the file needs them."""

_MORSEL: Final = 32 * 1024
"""The parser moves all that it was fed and has not read yet to the front, again and again: a frame of megabytes, given
to it as a whole, costs the square of its size."""


@dataclass(frozen=True, slots=True)
class Loaded:
    end: int
    """The byte after the last whole frame: where writing goes on."""
    chain: int
    database: int


def load_journal(engine: Engine, path: Path, files: Files, *, now_ms: int, up_to: int | None = None) -> Loaded:
    """Executes the journal, or its first ``up_to`` bytes, on an engine that must be empty.

    A torn tail is left out, with a warning. JournalCorrupt for anything else; the engine is then not to be used.
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
                for words in _commands(reader, offset, payload):
                    reply = engine.execute(session, words, now_ms)
                    if type(reply) is ErrorReply:
                        shown = b" ".join(words[:3]).decode("utf-8", "backslashreplace")
                        raise reader.corrupt(offset, f"{shown!r} was refused with {reply.text!r}")
    finally:
        engine.recording, engine.loading = recording, False
        database = session.db.index
        engine.drop(session)
        engine.take_units()
        engine.take_outbox()
    if reader.torn:
        logger.warning(
            "the journal %s ends in mid-write: cut off at byte %d, %d bytes dropped.",
            path,
            reader.end,
            size - reader.end,
        )
    return Loaded(reader.end, reader.chain, database)


def _commands(reader: FrameReader, offset: int, payload: bytes) -> Iterator[list[bytes]]:
    parser = hiredis.Reader()
    for start in range(0, len(payload), _MORSEL):
        parser.feed(payload[start : start + _MORSEL])
        while (words := parser.gets()) is not False:
            if type(words) is not list or not words:
                raise reader.corrupt(offset, "something that is not a command")
            if words[0] not in _BRACKETS:
                yield words
    if parser.has_data():
        raise reader.corrupt(offset, "a command without an end")
