"""From an embedded broker's directory to a Redis: every key is made there by the commands that a journal is made of.

Keys that exist there are refused before anything is written. Each key is made under a name of its own and takes its
right one in one step: whoever is interrupted, at any place, leaves no half of a key under the name that programs read.
Afterwards both sides are asked the same questions, and the answers must be the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit, urlunsplit

from millstream.broker.embedded import Embedded
from millstream.broker.keys import migrating_key
from millstream.broker.links.local import address_of
from millstream.broker.open import open_blocking_broker
from millstream.broker.operations.conversion import mapping
from millstream.engine import Session, Stream, effects_of_value
from millstream.errors import BrokerUnavailable, InvalidArgument, MillstreamError, ServerError
from millstream.wire import Args, Batch, Command, ErrorReply, format_double, to_name

COMMANDS_AT_A_TIME: Final = 500
KEPT_MS: Final = 86_400_000
"""How long half a key of an interrupted run outlives it, where no other run comes."""

Progress = Callable[[str, int, int], Any]
"""Told a key's name, how many keys are done, and how many there are."""


class KeysExist(MillstreamError):
    """The target has keys of the same names. Nothing was changed. ``keys`` names some, ``count`` counts them."""

    keys: list[str]
    count: int


class MigrationFailed(MillstreamError):
    """A key could not be written, or is not the same on both sides. ``key`` names it."""

    key: str


class TargetLost(MigrationFailed):
    """The target did not answer in the middle of a key. Try again when it does."""


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

    Each key appears whole, one after the other. Whoever is interrupted repeats it with ``skip_existing``: that passes
    over keys that are the same already, and makes the one that was under way anew. The source is only read.
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
        if not self._ask_source(b"EXISTS", key):
            return  # its time to live has ended since
        value, expires_ms = self._database.values[key], self._database.expires.get(key)
        counts = counts_of_stream(self._ask_source, key) if isinstance(value, Stream) else None
        half = migrating_key(key)
        try:
            self._clear(key, half)
            self._write(key, half, value)
            self._name(key, half, expires_ms)
            same = self._is_same(key)
        except MigrationFailed:
            raise
        except BrokerUnavailable as error:
            raise self._failed(key, f"the target was lost: {error}", TargetLost) from error
        except MillstreamError as error:
            raise self._failed(key, f"the target did not take it: {error}") from error
        if not same:
            raise self._failed(key, "it is not the same in the target, where somebody else may be writing to it")
        if counts is None:
            report.other_keys += 1
            return
        report.streams += 1
        report.entries += counts.entries
        report.groups += counts.groups
        report.consumers += counts.consumers
        report.pending += counts.pending

    def _clear(self, key: bytes, half: bytes) -> None:
        """What an interrupted run has left. Every such key ends by itself: one that does not is somebody else's."""
        if self._ask_target(b"PEXPIRETIME", half) == -1:
            raise self._failed(
                key, f"it is made as {to_name(half)!r}, and the target has a key of that name. Rename it"
            )
        self._ask_target(b"UNLINK", half)

    def _write(self, key: bytes, half: bytes, value: Any) -> None:
        """Under ``half``, which has an end from its first command on and at any later time."""
        ending = (b"PEXPIRE", half, b"%d" % KEPT_MS)
        effects = effects_of_value(half, value)
        first = Batch([next(effects), ending], key=half, atomic=True)
        rest = (Batch([*commands, ending], key=half) for commands in _portions(effects))
        for batch in chain([first], rest):
            for reply in self._broker.link.call_many(batch):
                if isinstance(reply, Exception):
                    self._ask_target(b"UNLINK", half)
                    raise self._failed(key, f"the target refused it: {reply}. What was written of it is removed again")

    def _name(self, key: bytes, half: bytes, expires_ms: int | None) -> None:
        """From now on it is there, with the end that it had in the source."""
        ending = (b"PERSIST", half) if expires_ms is None else (b"PEXPIREAT", half, b"%d" % expires_ms)
        _, renamed = self._broker.link.call_many(Batch([ending, (b"RENAMENX", half, key)], key=half, atomic=True))
        if renamed == 1 or not self._ask_source(b"EXISTS", key):
            return  # in the second case its time to live has just ended, on both sides
        self._ask_target(b"UNLINK", half)
        why = "somebody has made it in the target meanwhile" if renamed == 0 else f"the target refused it: {renamed}"
        raise self._failed(key, why)

    def _is_same(self, key: bytes) -> bool:
        return fingerprint(self._ask_source, key) == fingerprint(self._ask_target, key)

    def _failed(self, key: bytes, why: str, kind: type[MigrationFailed] = MigrationFailed) -> MigrationFailed:
        return kind(
            f"key {to_name(key)!r} was not moved: {why.rstrip('.')}. "
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


# --- whether a key is the same in two places: the same questions to both, and one hash over the answers ---

PAGE: Final = 1000

Ask = Callable[..., Any]
"""Sends a command's words; returns the reply in RESP2's shapes, raises an error reply."""


class StreamCounts(NamedTuple):
    entries: int
    groups: int
    consumers: int
    pending: int


def fingerprint(ask: Ask, key: bytes) -> bytes:
    """Type, value and expiry. Of a stream: all entries, counters, groups, consumers, and pending entries with their
    delivery counts and times."""
    hashed = hashlib.sha256()
    kind = ask(b"TYPE", key)
    for answer in (bytes(kind), ask(b"PEXPIRETIME", key), *_value(ask, key, bytes(kind))):
        hashed.update(repr(_plain(answer)).encode())
    return hashed.digest()


def counts_of_stream(ask: Ask, key: bytes) -> StreamCounts:
    groups = [mapping(group) for group in ask(b"XINFO", b"GROUPS", key)]
    return StreamCounts(
        ask(b"XLEN", key),
        len(groups),
        sum(group[b"consumers"] for group in groups),
        sum(group[b"pending"] for group in groups),
    )


def _value(ask: Ask, key: bytes, kind: bytes) -> Iterator[Any]:
    match kind:
        case b"string":
            yield ask(b"GET", key)
        case b"list":
            yield ask(b"LRANGE", key, b"0", b"-1")
        case b"set":
            yield sorted(ask(b"SMEMBERS", key))
        case b"zset":
            yield ask(b"ZRANGE", key, b"0", b"-1", b"WITHSCORES")
        case b"hash":
            flat = ask(b"HGETALL", key)
            yield sorted(zip(flat[::2], flat[1::2], strict=True))
        case b"stream":
            yield from _stream(ask, key)


def _stream(ask: Ask, key: bytes) -> Iterator[Any]:
    info = mapping(ask(b"XINFO", b"STREAM", key))
    yield [info.get(name) for name in (b"length", b"last-generated-id", b"max-deleted-entry-id", b"entries-added")]
    start = b"-"
    while entries := ask(b"XRANGE", key, start, b"+", b"COUNT", b"%d" % PAGE):
        yield entries
        if len(entries) < PAGE:
            break  # after the greatest id of all there is no other, and to ask for it is an error
        start = b"(" + entries[-1][0]
    for group in ask(b"XINFO", b"GROUPS", key):
        fields = mapping(group)
        name = fields[b"name"]
        yield sorted(fields.items())
        consumers = [mapping(one) for one in ask(b"XINFO", b"CONSUMERS", key, name)]
        yield sorted((one[b"name"], one[b"pending"]) for one in consumers)
        yield from _pending(ask, key, name)
    # The first of each group with its time as such: what the others' times are relative to.
    full = mapping(ask(b"XINFO", b"STREAM", key, b"FULL", b"COUNT", b"1"))
    yield [mapping(group)[b"pending"] for group in full[b"groups"]]


def _pending(ask: Ask, key: bytes, group: bytes) -> Iterator[Any]:
    """Servers tell how long ago, each by its own clock, when they are asked. Within one answer the differences are
    exact; so each page begins with the last entry of the page before, and one time alone has to be known as such."""
    start = b"-"
    while held := ask(b"XPENDING", key, group, start, b"+", b"%d" % PAGE):
        first = held[0][2]
        yield [[entry_id, consumer, first - idle, deliveries] for entry_id, consumer, idle, deliveries in held]
        if len(held) < PAGE:
            break
        start = held[-1][0]


def _plain(answer: Any) -> Any:
    """Without the marks that reply kinds carry: two servers may differ in them."""
    if isinstance(answer, list | tuple):
        return [_plain(item) for item in answer]
    if isinstance(answer, bytes):
        return bytes(answer)
    return format_double(answer) if isinstance(answer, float) else answer
