"""The driver's queries that plan a batch: stream names, XINFO, probes for splits, and ids if rows are counted.

With ``durability=replicated(n)`` only entries that n replicas have are visible.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from millstream.broker import BlockingBroker, Context, companion_key
from millstream.broker.failures import typed_error
from millstream.broker.operations.info import stream_info
from millstream.errors import BrokerUnavailable, DurabilityUnavailable, InvalidArgument, NoSuchStream
from millstream.model import Durability, EntryId, StreamInfo
from millstream.spark.offsets import PROBE_DEPTH, cuts, guesses, probe_points
from millstream.spark.options import SourceOptions
from millstream.wire import Args, Batch, Command, ErrorReply, to_bytes

_CONTEXT = Context()
STREAM_LIST_TTL_S = 1.0
"""How long the streams of a pattern are cached: listing scans all keys, and an idle query polls 100 times a second."""


def parse_stream_info(stream: str, reply: Any) -> StreamInfo | None:
    """Parses the raw reply of XINFO STREAM; None if the stream does not exist."""
    if isinstance(reply, ErrorReply):
        error = typed_error(reply)
        if isinstance(error, NoSuchStream):
            return None
        raise error
    operation = stream_info(_CONTEXT, stream)
    next(operation)
    try:
        operation.send(reply)
    except StopIteration as done:
        info: StreamInfo = done.value
        return info
    raise AssertionError("stream_info sends one command")


def entry_digest(entries: Sequence[Any]) -> str | None:
    """A digest of the entry in XRANGE's raw reply; None if the reply is empty."""
    if not entries:
        return None
    digest = hashlib.blake2s(digest_size=8)
    for item in entries[0][1]:
        digest.update(b"%d:" % len(item))
        digest.update(item)
    return digest.hexdigest()


class StreamStats(Protocol):
    """What plans need to know of the server. Tests use an implementation without a server."""

    def streams(self) -> list[str]: ...

    def stream_infos(self, streams: Iterable[str]) -> dict[str, StreamInfo | None]: ...

    def entry_digests(self, entry_ids: Mapping[str, EntryId]) -> dict[str, str | None]: ...

    def cuts(self, stream: str, after: EntryId, upto: EntryId, parts: int) -> tuple[EntryId, ...]: ...

    def ids(self, stream: str, after: EntryId, upto: EntryId, row_limit: int) -> Iterator[EntryId]: ...


class RedisStreamStats:
    def __init__(self, broker: BlockingBroker, options: SourceOptions) -> None:
        self._broker = broker
        self._options = options
        self._listed: tuple[float, list[str]] | None = None

    def streams(self) -> list[str]:
        if self._options.pattern is None:
            return list(self._options.streams)
        now = time.monotonic()
        if self._listed is None or now - self._listed[0] > STREAM_LIST_TTL_S:
            matches = re.compile(self._options.pattern).fullmatch
            self._listed = now, [name for name in self._broker.list_streams("*") if matches(name)]
        return list(self._listed[1])

    def stream_infos(self, streams: Iterable[str]) -> dict[str, StreamInfo | None]:
        """XINFO STREAM of each stream, in one round trip (on a cluster one for each node)."""
        names = list(streams)
        keys = [to_bytes(name) for name in names]
        replies = self._replies([(b"XINFO", b"STREAM", key) for key in keys], keys)
        return {name: parse_stream_info(name, reply) for name, reply in zip(names, replies, strict=True)}

    def entry_digests(self, entry_ids: Mapping[str, EntryId]) -> dict[str, str | None]:
        """For each stream the digest of the entry with the given id; None if it does not exist."""
        keys = [to_bytes(name) for name in entry_ids]
        ids = [bytes(entry_id) for entry_id in entry_ids.values()]
        commands = [(b"XRANGE", key, entry_id, entry_id) for key, entry_id in zip(keys, ids, strict=True)]
        replies = zip(entry_ids, self._replies(commands, keys), strict=True)
        return {name: entry_digest(_checked(reply)) for name, reply in replies}

    def cuts(self, stream: str, after: EntryId, upto: EntryId, parts: int) -> tuple[EntryId, ...]:
        """Ids of entries that split ``(after, upto]`` into about ``parts`` equal ranges. Two small round trips."""
        points = probe_points(after, upto, parts)
        probes = self._ids_before(stream, after, points, PROBE_DEPTH)
        estimates = guesses(after, upto, parts, points, probes)
        existing = self._ids_before(stream, after, estimates, 1)
        return cuts(after, upto, [ids[0] if ids else None for ids in existing])

    def ids(self, stream: str, after: EntryId, upto: EntryId, row_limit: int) -> Iterator[EntryId]:
        """The ids of at most ``row_limit`` entries with ``after < id <= upto``."""
        key, remaining = to_bytes(stream), row_limit
        while remaining > 0 and after < upto:
            size = min(remaining, self._options.page_size)
            args = (b"XRANGE", key, b"(" + bytes(after), bytes(upto), b"COUNT", b"%d" % size)
            page = self._broker.transport.call(Command(args, key, repeatable=True))
            for item in page:
                after = EntryId.parse(item[0])
                yield after
            remaining -= len(page)
            if len(page) < size:
                return

    def _ids_before(self, stream: str, after: EntryId, points: Sequence[EntryId], depth: int) -> list[list[EntryId]]:
        if not points:
            return []
        key, first = to_bytes(stream), b"(" + bytes(after)
        commands = [(b"XREVRANGE", key, bytes(point), first, b"COUNT", b"%d" % depth) for point in points]
        replies = self._broker.transport.call_many(Batch(commands, key, repeatable=True))
        return [[EntryId.parse(item[0]) for item in _checked(reply)] for reply in replies]

    def _replies(self, commands: Sequence[Args], keys: Sequence[bytes]) -> list[Any]:
        if not commands:
            return []
        if not self._broker.transport.features.cluster:
            return self._broker.transport.call_many(Batch(commands, keys[0], repeatable=True))
        replies = self._broker.transport.call_many(Batch(commands, keys=keys, repeatable=True))
        for reply in replies:
            if isinstance(reply, BrokerUnavailable):
                raise reply
        return replies


def _checked(reply: Any) -> Any:
    if isinstance(reply, ErrorReply):
        raise typed_error(reply)
    return reply


REPLICA_KEY_TTL_MS = 86_400_000

log = logging.getLogger("millstream.spark")


def stream_stats_for(broker: BlockingBroker, options: SourceOptions) -> RedisStreamStats:
    """The stream stats to plan batches with."""
    if options.durability is None:
        return RedisStreamStats(broker, options)
    return ReplicatedStreamStats(broker, options, options.durability)


class ReplicatedStreamStats(RedisStreamStats):
    """Stream stats that replicas have confirmed.

    An idle query only sends XINFO. If a stream has new entries, XINFO is sent again, with a write and a WAIT on the
    same connection: the entries that it shows are then on the replicas. The write is needed because servers newer
    than Redis 7.0 only wait for a connection's own writes.
    """

    def __init__(self, broker: BlockingBroker, options: SourceOptions, durability: Durability) -> None:
        super().__init__(broker, options)
        self._durability = durability
        self._confirmed: dict[str, EntryId] = {}

    def stream_infos(self, streams: Iterable[str]) -> dict[str, StreamInfo | None]:
        """Raises DurabilityUnavailable when the replicas have not caught up within ``deadlineMs``."""
        infos = super().stream_infos(streams)
        moved = [
            name
            for name, info in infos.items()
            if info is not None and info.last_generated != self._confirmed.get(name)
        ]
        groups = [[name] for name in moved] if self._broker.transport.features.cluster else [moved] if moved else []
        for names in groups:
            infos |= self._infos_until_replicated(names)
        return infos

    def _infos_until_replicated(self, names: Sequence[str]) -> dict[str, StreamInfo | None]:
        until = time.monotonic() + self._options.address.deadline_ms / 1000
        key = _companion_of(names)
        is_logged = False
        while True:
            replies, replicas = self._infos_and_replicas(names, key)
            if replicas >= self._durability.replicas:
                infos = {name: parse_stream_info(name, reply) for name, reply in zip(names, replies, strict=True)}
                self._confirmed |= {name: info.last_generated for name, info in infos.items() if info is not None}
                return infos
            if time.monotonic() >= until:
                raise DurabilityUnavailable(
                    str(self._durability),
                    f"for {self._options.address.deadline_ms} ms only {replicas} replicas had all entries of stream "
                    f"{names[0]!r}. Nothing was read. Check the replicas (INFO replication), or ask for fewer.",
                )
            if not is_logged:
                is_logged = True
                log.warning(
                    "only %d replicas have all entries of stream %r: waiting for %s",
                    replicas,
                    names[0],
                    self._durability,
                )

    def _infos_and_replicas(self, names: Sequence[str], key: bytes) -> tuple[list[Any], int]:
        """XINFO of each stream, and the number of replicas that have the entries it shows."""
        commands: list[Args] = [(b"XINFO", b"STREAM", to_bytes(name)) for name in names]
        wait = (b"WAIT", b"%d" % self._durability.replicas, b"%d" % self._durability.timeout_ms)
        renewal = (b"PEXPIRE", key, b"%d" % REPLICA_KEY_TTL_MS)
        batch = Batch([*commands, renewal], key, repeatable=True, same_connection=True, after=wait)
        *infos, renewed, replicas = self._broker.transport.call_many(batch)
        if renewed == 0:
            # The key does not exist yet. A server without free memory rejects creating it, but not renewing its TTL, so
            # that a query continues to read there.
            self._create_key(key, renewal)
            *infos, renewed, replicas = self._broker.transport.call_many(batch)
        for reply in (renewed, replicas):
            if isinstance(reply, ErrorReply):
                raise typed_error(reply)
        return infos, replicas if renewed == 1 else 0

    def _create_key(self, key: bytes, renewal: Args) -> None:
        batch = Batch([(b"HSET", key, b"asked", b"1"), renewal], key, atomic=True, repeatable=True)
        for reply in self._broker.transport.call_many(batch):
            if isinstance(reply, ErrorReply):
                raise typed_error(reply)


def _companion_of(streams: Sequence[str]) -> bytes:
    """A companion key of the first stream whose name allows one."""
    invalid_name: InvalidArgument | None = None
    for stream in streams:
        try:
            return companion_key(stream, "replicas")
        except InvalidArgument as error:
            invalid_name = error
    assert invalid_name is not None
    raise invalid_name
