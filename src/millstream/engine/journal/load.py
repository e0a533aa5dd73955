"""From the file back to the state: every command of the journal is executed again, with the clock that it carries."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import hiredis

from millstream.engine.journal.files import Files
from millstream.engine.journal.frames import FIRST_CHAIN, FrameReader
from millstream.wire import ErrorReply

if TYPE_CHECKING:
    from millstream.engine.engine import Engine

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
    commands: int
    torn_bytes: int


def load(engine: Engine, path: Path, files: Files, *, now_ms: int, up_to: int | None = None) -> Loaded:
    """Executes the journal, or its first ``up_to`` bytes, on an engine that must be empty.

    A torn tail is left out, with a warning. JournalCorrupt for anything else; the engine is then not to be used.
    """
    size = files.size(path) if up_to is None else up_to
    if not size:
        return Loaded(0, FIRST_CHAIN, 0, 0, 0)
    session = engine.session(trusted=True)
    recording, engine.recording, engine.loading = engine.recording, False, True
    commands = 0
    try:
        with files.read(path) as file:
            reader = FrameReader(file, path, size)
            for offset, payload in reader:
                for words in _commands(reader, offset, payload):
                    reply = engine.execute(session, words, now_ms)
                    if type(reply) is ErrorReply:
                        shown = b" ".join(words[:3]).decode("utf-8", "backslashreplace")
                        raise reader.corrupt(offset, f"{shown!r} was refused with {reply.text!r}")
                    commands += 1
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
    return Loaded(reader.end, reader.chain, database, commands, size - reader.end)


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
