"""From an embedded broker's directory to a Redis: every key is made there by the commands that a journal is made of.

Keys that exist there are refused before anything is written. Afterwards both sides are asked the same questions, and
the answers must be the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from millstream.broker.compare_keys import counts_of_stream, fingerprint
from millstream.broker.embedded import Embedded
from millstream.broker.links.local import address_of
from millstream.broker.open import open_blocking_broker
from millstream.engine import Session, Stream, effects_of_key
from millstream.errors import InvalidArgument, MillstreamError, ServerError
from millstream.wire import Args, Batch, Command, ErrorReply, to_name

COMMANDS_AT_A_TIME: Final = 500

Progress = Callable[[str, int, int], Any]
"""Told a key's name, how many keys are done, and how many there are."""


class KeysExist(MillstreamError):
    """The target has keys of the same names. Nothing was changed. ``keys`` names some, ``count`` counts them."""

    keys: list[str]
    count: int


class MigrationFailed(MillstreamError):
    """A key could not be written, or is not the same on both sides. ``key`` names it."""

    key: str


@dataclass(slots=True)
class Report:
    streams: int = 0
    entries: int = 0
    groups: int = 0
    consumers: int = 0
    pending: int = 0
    other_keys: int = 0
    skipped: int = 0
    """Keys that were there already, and the same."""
    databases: list[int] = field(default_factory=list)


def _no_progress(name: str, done: int, total: int) -> None:
    """Nobody watches."""


def migrate(source: str, target: str, *, skip_existing: bool = False, progress: Progress = _no_progress) -> Report:
    """Copies every key of ``source`` (local:///path) to ``target`` (redis:// and its kin, sentinel and cluster too).

    Not atomic: keys appear one after the other. A key that fails half-way is removed again, those before it stay; with
    ``skip_existing`` a second run passes over keys that are the same already. The source is only read.
    """
    address = address_of(source)
    if not address.path:
        raise InvalidArgument("--from", source, "local:///path, the directory of an embedded broker")
    if not Path(address.path).is_dir():
        raise InvalidArgument("--from", source, "a directory that exists")
    embedded = Embedded(directory=Path(address.path), housekeeping=False, appendfsync="no")
    try:
        embedded.tick()
        return _migrate_databases(embedded, target, skip_existing, progress)
    finally:
        embedded.close()


def _migrate_databases(embedded: Embedded, target: str, skip_existing: bool, progress: Progress) -> Report:
    databases = [database.index for database in embedded.engine.databases if database.values]
    moves = [_Move(embedded, index, _with_database(target, index, databases)) for index in databases]
    try:
        same = [move.check_target(skip_existing) for move in moves]
        report = Report(databases=databases)
        total, done = sum(len(move.keys) for move in moves), 0
        for move, skipped in zip(moves, same, strict=True):
            for key in move.keys:
                progress(to_name(key), done, total)
                done += 1
                if key in skipped:
                    report.skipped += 1
                else:
                    move.copy(key, report)
        progress("", total, total)
        return report
    finally:
        for move in moves:
            move.close()


def _with_database(url: str, index: int, databases: list[int]) -> str:
    """Database 0 goes where the URL points; others only to a URL that names none, under their own numbers."""
    if databases == [0]:
        return url
    parts = urlsplit(url)
    if "+" in parts.scheme or parts.scheme == "unix" or parts.path.strip("/"):
        raise InvalidArgument("--to", parts.scheme + "://...", f"redis://host:port: databases {databases} are in use")
    return urlunsplit(parts._replace(path=f"/{index}"))


class _Move:
    """One database on its way."""

    def __init__(self, embedded: Embedded, index: int, url: str) -> None:
        self._embedded = embedded
        self._database = embedded.engine.databases[index]
        self._session: Session = embedded.session()
        embedded.execute(self._session, (b"SELECT", b"%d" % index))
        self._broker = open_blocking_broker(url)
        self.keys = sorted(self._database.values)

    def close(self) -> None:
        self._embedded.drop(self._session)
        self._broker.close()

    def check_target(self, skip_existing: bool) -> set[bytes]:
        """The keys that are there already and the same. KeysExist for others."""
        existing = [key for key in self.keys if self._ask_target(b"EXISTS", key)]
        same = {key for key in existing if skip_existing and self._is_same(key)}
        rest = [to_name(key) for key in existing if key not in same]
        if rest:
            shown = ", ".join(repr(key) for key in rest[:5]) + (", ..." if len(rest) > 5 else "")
            raise KeysExist(
                f"{len(rest)} of {len(self.keys)} keys exist in the target: {shown}. Nothing was changed. "
                "Remove or rename them there, or choose another database.",
                keys=rest[:100],
                count=len(rest),
            )
        return same

    def copy(self, key: bytes, report: Report) -> None:
        effects = effects_of_key(self._database, key)
        for commands in _portions(effects):
            for reply in self._broker.link.call_many(Batch(commands, key=key)):
                if isinstance(reply, Exception):
                    self._ask_target(b"UNLINK", key)
                    raise self._failed(key, f"the target refused it: {reply}. What was written of it is removed again")
        if not self._is_same(key):
            raise self._failed(key, "it is not the same in the target, where somebody else may be writing to it")
        value = self._database.values[key]
        if isinstance(value, Stream):
            counts = counts_of_stream(self._ask_source, key)
            report.streams += 1
            report.entries += counts.entries
            report.groups += counts.groups
            report.consumers += counts.consumers
            report.pending += counts.pending
        else:
            report.other_keys += 1

    def _is_same(self, key: bytes) -> bool:
        return fingerprint(self._ask_source, key) == fingerprint(self._ask_target, key)

    def _failed(self, key: bytes, why: str) -> MigrationFailed:
        return MigrationFailed(
            f"key {to_name(key)!r} was not moved: {why}. "
            "The keys before it are in the target; when this is mended, repeat with --skip-existing.",
            key=to_name(key),
        )

    def _ask_source(self, *words: bytes) -> Any:
        reply = self._embedded.execute(self._session, words)
        if isinstance(reply, ErrorReply):
            raise ServerError(reply.text)
        return reply

    def _ask_target(self, *words: bytes) -> Any:
        return self._broker.link.call(Command(words, key=_key_of(words), repeatable=True))


def _key_of(words: Sequence[bytes]) -> bytes:
    """Every question names its key second, XINFO's third."""
    return words[2] if words[0] in (b"XINFO", b"OBJECT") else words[1]


def _portions(effects: Iterable[Args]) -> Iterator[list[Args]]:
    rest = iter(effects)
    while portion := list(islice(rest, COMMANDS_AT_A_TIME)):
        yield portion
