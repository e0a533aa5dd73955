"""``migrate``: copies an embedded broker's directory to a Redis, with the commands that a journal consists of.

If keys of the same names exist in the target, it is refused before anything is written. Each key is written under a
temporary name and renamed when it is complete, so that an interruption never leaves an incomplete key under the name
that programs read. Afterwards both sides are read with the same commands and must give the same replies.
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
from millstream.broker.keys import migration_key
from millstream.broker.open import open_blocking_broker
from millstream.broker.operations.conversion import mapping
from millstream.broker.transport.local_address import address_of
from millstream.engine import Session
from millstream.engine.effects import effects_of_value
from millstream.engine.stream import Stream
from millstream.errors import BrokerUnavailable, InvalidArgument, MillstreamError, ServerError
from millstream.wire import Args, Batch, Command, ErrorReply, format_double, to_name

COMMANDS_PER_BATCH: Final = 500
TEMPORARY_KEY_TTL_MS: Final = 86_400_000
"""The time to live of an incomplete key, if no other run continues an interrupted one."""

Progress = Callable[[str, int, int], Any]
"""Called with a key's name, the number of keys done, and the total number."""


class KeysExist(MillstreamError):
    """The target has keys of the same names. Nothing was changed. ``keys`` lists up to 100, ``count`` is their
    number.
    """

    keys: list[str]
    count: int


class MigrationFailed(MillstreamError):
    """A key could not be written, or differs between the two sides. ``key`` is its name."""

    key: str


class TargetLost(MigrationFailed):
    """The target stopped replying while a key was copied. Retry when it is reachable."""


@dataclass(slots=True)
class Report:
    """What a migration copied."""

    streams: int = 0
    entries: int = 0
    groups: int = 0
    consumers: int = 0
    pending: int = 0
    other_keys: int = 0
    skipped: int = 0
    """Keys that existed already with the same content."""
    databases: list[int] = field(default_factory=list)


def _no_progress(name: str, done: int, total: int) -> None:
    """Ignores the progress."""


def migrate(source: str, target: str, *, skip_existing: bool = False, progress: Progress = _no_progress) -> Report:
    """Copies every key of ``source`` (local:///path) to ``target`` (redis://, rediss://, sentinel or cluster).

    Keys are copied one after another and appear only when complete. After an interruption repeat it with
    ``skip_existing``: keys that are the same already are skipped, and the key that was in progress is copied again. The
    source is only read.
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
    copies = [_DatabaseCopy(embedded, index, _with_database(target, index, databases)) for index in databases]
    try:
        same = [database_copy.check_target(skip_existing) for database_copy in copies]
        report = Report(databases=databases)
        total, done = sum(len(database_copy.keys) for database_copy in copies), 0
        for database_copy, skipped in zip(copies, same, strict=True):
            for key in database_copy.keys:
                progress(to_name(key), done, total)
                done += 1
                if key in skipped:
                    report.skipped += 1
                else:
                    database_copy.copy(key, report)
        progress("", total, total)
        return report
    finally:
        for database_copy in copies:
            database_copy.close()


def _with_database(url: str, index: int, databases: list[int]) -> str:
    """The URL of the target for database ``index``: database 0 uses the URL; others need a URL without a database."""
    if databases == [0]:
        return url
    parts = urlsplit(url)
    if "+" in parts.scheme or parts.scheme == "unix" or parts.path.strip("/"):
        raise InvalidArgument(
            "--to",
            parts.scheme + "://...",
            f"redis://host:port without a database number, because the source uses databases {databases}",
        )
    return urlunsplit(parts._replace(path=f"/{index}"))


class _DatabaseCopy:
    """Copies one database."""

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
        """The keys that exist in the target with the same content. Raises KeysExist for others."""
        existing = [key for key in self.keys if self._run_on_target(b"EXISTS", key)]
        same = {key for key in existing if skip_existing and self._is_same(key)}
        different = [to_name(key) for key in existing if key not in same]
        if different:
            names = ", ".join(repr(key) for key in different[:5]) + (", ..." if len(different) > 5 else "")
            raise KeysExist(
                f"{len(different)} of {len(self.keys)} keys exist in the target: {names}. Nothing was changed. "
                "Remove or rename them there, or choose another database.",
                keys=different[:100],
                count=len(different),
            )
        return same

    def copy(self, key: bytes, report: Report) -> None:
        """Copies one key and compares both sides."""
        if not self._run_on_source(b"EXISTS", key):
            return  # it has expired meanwhile
        value, expires_ms = self._database.values[key], self._database.expires.get(key)
        counts = counts_of_stream(self._run_on_source, key) if isinstance(value, Stream) else None
        temporary = migration_key(key)
        try:
            self._clear(key, temporary)
            self._write(key, temporary, value)
            self._rename(key, temporary, expires_ms)
            same = self._is_same(key)
        except MigrationFailed:
            raise
        except BrokerUnavailable as error:
            raise self._failed(key, f"the target stopped replying: {error}", TargetLost) from error
        except MillstreamError as error:
            raise self._failed(key, f"the target rejected it: {error}") from error
        if not same:
            raise self._failed(key, "its content in the target differs; another client may be writing to it")
        if counts is None:
            report.other_keys += 1
            return
        report.streams += 1
        report.entries += counts.entries
        report.groups += counts.groups
        report.consumers += counts.consumers
        report.pending += counts.pending

    def _clear(self, key: bytes, temporary: bytes) -> None:
        """Deletes what an interrupted run left. Such a key always has a time to live; a key without one belongs to
        another program.
        """
        if self._run_on_target(b"PEXPIRETIME", temporary) == -1:
            raise self._failed(
                key, f"its temporary name is {to_name(temporary)!r}, and the target has a key of that name. Rename it"
            )
        self._run_on_target(b"UNLINK", temporary)

    def _write(self, key: bytes, temporary: bytes, value: Any) -> None:
        """Writes the value under the temporary name, which has a time to live from its first command on."""
        ending = (b"PEXPIRE", temporary, b"%d" % TEMPORARY_KEY_TTL_MS)
        effects = effects_of_value(temporary, value)
        first = Batch([next(effects), ending], key=temporary, atomic=True)
        batches = (Batch([*commands, ending], key=temporary) for commands in _batches(effects))
        for batch in chain([first], batches):
            for reply in self._broker.transport.call_many(batch):
                if isinstance(reply, Exception):
                    self._run_on_target(b"UNLINK", temporary)
                    raise self._failed(key, f"the target refused it: {reply}. The incomplete copy was deleted")

    def _rename(self, key: bytes, temporary: bytes, expires_ms: int | None) -> None:
        """Gives the key its final name and the expiry of the source."""
        ending = (b"PERSIST", temporary) if expires_ms is None else (b"PEXPIREAT", temporary, b"%d" % expires_ms)
        _, renamed = self._broker.transport.call_many(
            Batch([ending, (b"RENAMENX", temporary, key)], key=temporary, atomic=True)
        )
        if renamed == 1 or not self._run_on_source(b"EXISTS", key):
            return  # in the second case it has just expired on both sides
        self._run_on_target(b"UNLINK", temporary)
        why = (
            "another client created it in the target meanwhile" if renamed == 0 else f"the target refused it: {renamed}"
        )
        raise self._failed(key, why)

    def _is_same(self, key: bytes) -> bool:
        return fingerprint(self._run_on_source, key) == fingerprint(self._run_on_target, key)

    def _failed(self, key: bytes, why: str, kind: type[MigrationFailed] = MigrationFailed) -> MigrationFailed:
        return kind(
            f"key {to_name(key)!r} was not copied: {why.rstrip('.')}. "
            "The keys before it are in the target; after fixing this, repeat with --skip-existing.",
            key=to_name(key),
        )

    def _run_on_source(self, *args: bytes) -> Any:
        reply = self._embedded.execute(self._session, args)
        if isinstance(reply, ErrorReply):
            raise ServerError(reply.text)
        return reply

    def _run_on_target(self, *args: bytes) -> Any:
        return self._broker.transport.call(Command(args, key=_key_of(args), repeatable=True))


def _key_of(args: Sequence[bytes]) -> bytes:
    """The key of a command: its second argument, or the third of XINFO and OBJECT."""
    return args[2] if args[0] in (b"XINFO", b"OBJECT") else args[1]


def _batches(effects: Iterable[Args]) -> Iterator[list[Args]]:
    remaining = iter(effects)
    while batch := list(islice(remaining, COMMANDS_PER_BATCH)):
        yield batch


# --- comparing a key on both sides: the same commands to both, and one hash of the replies ---

PAGE_SIZE: Final = 1000

RunCommand = Callable[..., Any]
"""Sends a command and returns the reply as in RESP2; raises an error reply."""


class StreamCounts(NamedTuple):
    entries: int
    groups: int
    consumers: int
    pending: int


def fingerprint(run: RunCommand, key: bytes) -> bytes:
    """A hash of the type, value and expiry of a key.

    For a stream: all entries, counters, groups, consumers, and pending entries with delivery counts and times.
    """
    hashed = hashlib.sha256()
    kind = run(b"TYPE", key)
    for reply in (bytes(kind), run(b"PEXPIRETIME", key), *_value(run, key, bytes(kind))):
        hashed.update(repr(_plain(reply)).encode())
    return hashed.digest()


def counts_of_stream(run: RunCommand, key: bytes) -> StreamCounts:
    groups = [mapping(group) for group in run(b"XINFO", b"GROUPS", key)]
    return StreamCounts(
        run(b"XLEN", key),
        len(groups),
        sum(group[b"consumers"] for group in groups),
        sum(group[b"pending"] for group in groups),
    )


def _value(run: RunCommand, key: bytes, kind: bytes) -> Iterator[Any]:
    match kind:
        case b"string":
            yield run(b"GET", key)
        case b"list":
            yield run(b"LRANGE", key, b"0", b"-1")
        case b"set":
            yield sorted(run(b"SMEMBERS", key))
        case b"zset":
            yield run(b"ZRANGE", key, b"0", b"-1", b"WITHSCORES")
        case b"hash":
            flat = run(b"HGETALL", key)
            yield sorted(zip(flat[::2], flat[1::2], strict=True))
        case b"stream":
            yield from _stream(run, key)


def _stream(run: RunCommand, key: bytes) -> Iterator[Any]:
    info = mapping(run(b"XINFO", b"STREAM", key))
    yield [info.get(name) for name in (b"length", b"last-generated-id", b"max-deleted-entry-id", b"entries-added")]
    start = b"-"
    while entries := run(b"XRANGE", key, start, b"+", b"COUNT", b"%d" % PAGE_SIZE):
        yield entries
        if len(entries) < PAGE_SIZE:
            break  # the range after the greatest possible id is an error
        start = b"(" + entries[-1][0]
    for group in run(b"XINFO", b"GROUPS", key):
        fields = mapping(group)
        name = fields[b"name"]
        yield sorted(fields.items())
        consumers = [mapping(consumer) for consumer in run(b"XINFO", b"CONSUMERS", key, name)]
        yield sorted((consumer[b"name"], consumer[b"pending"]) for consumer in consumers)
        yield from _pending(run, key, name)
    # The first pending entry of each group with its absolute time; the other times are compared relative to it.
    full = mapping(run(b"XINFO", b"STREAM", key, b"FULL", b"COUNT", b"1"))
    yield [mapping(group)[b"pending"] for group in full[b"groups"]]


def _pending(run: RunCommand, key: bytes, group: bytes) -> Iterator[Any]:
    """The pending entries, with times relative to the first entry of each page.

    A server reports idle times by its own clock at the moment of the call. Within one reply the differences are exact.
    Each page begins with the last entry of the previous page, so that only one absolute time must be compared.
    """
    start = b"-"
    while page := run(b"XPENDING", key, group, start, b"+", b"%d" % PAGE_SIZE):
        first = page[0][2]
        yield [[entry_id, consumer, first - idle, deliveries] for entry_id, consumer, idle, deliveries in page]
        if len(page) < PAGE_SIZE:
            break
        start = page[-1][0]


def _plain(reply: Any) -> Any:
    """The reply as plain lists, bytes and numbers: two servers may use different RESP types for the same value."""
    if isinstance(reply, list | tuple):
        return [_plain(item) for item in reply]
    if isinstance(reply, bytes):
        return bytes(reply)
    return format_double(reply) if isinstance(reply, float) else reply
