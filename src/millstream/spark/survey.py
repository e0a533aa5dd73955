"""What the driver asks the server to plan a batch: names, XINFO, a few probes, and ids where rows are counted; for
``durability=replicated(n)`` nothing that n replicas do not hold.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from millstream.broker import BlockingBroker, Context, beside, stream_info, typed
from millstream.errors import DurabilityUnavailable, InvalidArgument, NoSuchStream
from millstream.model import Durability, EntryId, StreamInfo
from millstream.spark.offsets import PROBE_DEPTH, cuts, guesses, probe_points
from millstream.spark.options import SourceOptions
from millstream.wire import Args, Batch, Command, ErrorReply, to_bytes

_SITE = Context()
LISTING_S = 1.0
"""A pattern costs a scan over all keys, and an idle query polls a hundred times a second: once in this time will do."""


def told(stream: str, reply: Any) -> StreamInfo | None:
    """XINFO STREAM's raw reply as a value; None where the stream does not exist."""
    if isinstance(reply, ErrorReply):
        error = typed(reply)
        if isinstance(error, NoSuchStream):
            return None
        raise error
    conversation = stream_info(_SITE, stream)
    next(conversation)
    try:
        conversation.send(reply)
    except StopIteration as done:
        info: StreamInfo = done.value
        return info
    raise AssertionError("stream_info asks one question")


def witness(entries: Sequence[Any]) -> str | None:
    """A digest of the one entry in XRANGE's raw reply; None where it is empty."""
    if not entries:
        return None
    digest = hashlib.blake2s(digest_size=8)
    for word in entries[0][1]:
        digest.update(b"%d:" % len(word))
        digest.update(word)
    return digest.hexdigest()


class Survey(Protocol):
    """The driver's view of the server; tests plan over a made-up one."""

    def streams(self) -> list[str]: ...

    def look(self, streams: Iterable[str]) -> dict[str, StreamInfo | None]: ...

    def witnesses(self, places: Mapping[str, EntryId]) -> dict[str, str | None]: ...

    def cuts(self, stream: str, after: EntryId, upto: EntryId, parts: int) -> tuple[EntryId, ...]: ...

    def ids(self, stream: str, after: EntryId, upto: EntryId, most: int) -> Iterator[EntryId]: ...


class RedisSurvey:
    def __init__(self, broker: BlockingBroker, options: SourceOptions) -> None:
        self._broker = broker
        self._options = options
        self._listed: tuple[float, list[str]] | None = None

    def streams(self) -> list[str]:
        if self._options.pattern is None:
            return list(self._options.streams)
        now = time.monotonic()
        if self._listed is None or now - self._listed[0] > LISTING_S:
            matches = re.compile(self._options.pattern).fullmatch
            self._listed = now, [name for name in self._broker.list_streams("*") if matches(name)]
        return list(self._listed[1])

    def look(self, streams: Iterable[str]) -> dict[str, StreamInfo | None]:
        """XINFO STREAM of each: one trip for all of them, except on a cluster."""
        names = list(streams)
        questions: list[Args] = [(b"XINFO", b"STREAM", to_bytes(name)) for name in names]
        return {name: told(name, reply) for name, reply in zip(names, self._ask(questions), strict=True)}

    def witnesses(self, places: Mapping[str, EntryId]) -> dict[str, str | None]:
        """Stream to a digest of the entry at a place; None where there is none. One trip, except on a cluster."""
        names = list(places)
        questions: list[Args] = [
            (b"XRANGE", to_bytes(name), bytes(places[name]), bytes(places[name])) for name in names
        ]
        found = zip(names, self._ask(questions, key_at=1), strict=True)
        return {name: witness(_checked(reply)) for name, reply in found}

    def cuts(self, stream: str, after: EntryId, upto: EntryId, parts: int) -> tuple[EntryId, ...]:
        """Ids of entries that cut ``(after, upto]`` into about ``parts`` equal ranges. Two small trips."""
        points = probe_points(after, upto, parts)
        probes = self._ids_before(stream, after, points, PROBE_DEPTH)
        guessed = guesses(after, upto, parts, points, probes)
        real = self._ids_before(stream, after, guessed, 1)
        return cuts(after, upto, [found[0] if found else None for found in real])

    def ids(self, stream: str, after: EntryId, upto: EntryId, most: int) -> Iterator[EntryId]:
        """The ids of at most ``most`` entries with ``after < id <= upto``."""
        key, left = to_bytes(stream), most
        while left > 0 and after < upto:
            size = min(left, self._options.page_size)
            words = (b"XRANGE", key, b"(" + bytes(after), bytes(upto), b"COUNT", b"%d" % size)
            page = self._broker.link.call(Command(words, key, repeatable=True))
            for item in page:
                after = EntryId.parse(item[0])
                yield after
            left -= len(page)
            if len(page) < size:
                return

    def _ids_before(self, stream: str, after: EntryId, points: Sequence[EntryId], depth: int) -> list[list[EntryId]]:
        if not points:
            return []
        key, first = to_bytes(stream), b"(" + bytes(after)
        commands = [(b"XREVRANGE", key, bytes(point), first, b"COUNT", b"%d" % depth) for point in points]
        replies = self._broker.link.call_many(Batch(commands, key, repeatable=True))
        return [[EntryId.parse(item[0]) for item in _checked(reply)] for reply in replies]

    def _ask(self, commands: list[Args], key_at: int = -1) -> list[Any]:
        if not commands:
            return []
        if not self._broker.link.features.cluster:
            return self._broker.link.call_many(Batch(commands, commands[0][key_at], repeatable=True))
        return [self._broker.link.call_many(Batch([words], words[key_at], repeatable=True))[0] for words in commands]


def _checked(reply: Any) -> Any:
    if isinstance(reply, ErrorReply):
        raise typed(reply)
    return reply


KEPT_MS = 86_400_000

log = logging.getLogger("millstream.spark")


def survey_for(broker: BlockingBroker, options: SourceOptions) -> RedisSurvey:
    """Whoever plans a batch sees streams through this."""
    if options.durability is None:
        return RedisSurvey(broker, options)
    return ReplicatedSurvey(broker, options, options.durability)


class ReplicatedSurvey(RedisSurvey):
    """Streams are looked at first as always, so that an idle query costs what it always costs. One that has moved is
    looked at again, together with a write and a WAIT on the same connection: then what it showed is on the replicas.
    Servers newer than Redis 7.0 wait for a connection's own writes only.
    """

    def __init__(self, broker: BlockingBroker, options: SourceOptions, wanted: Durability) -> None:
        super().__init__(broker, options)
        self._wanted = wanted
        self._confirmed: dict[str, EntryId] = {}

    def look(self, streams: Iterable[str]) -> dict[str, StreamInfo | None]:
        """Raises DurabilityUnavailable when the replicas have not caught up within ``deadlineMs``."""
        found = super().look(streams)
        moved = [
            name
            for name, info in found.items()
            if info is not None and info.last_generated != self._confirmed.get(name)
        ]
        together = [[name] for name in moved] if self._broker.link.features.cluster else [moved] if moved else []
        for names in together:
            found |= self._look_until_confirmed(names)
        return found

    def _look_until_confirmed(self, names: Sequence[str]) -> dict[str, StreamInfo | None]:
        until = time.monotonic() + self._options.address.deadline_ms / 1000
        key = _key_beside(names)
        told_so = False
        while True:
            replies, replicas = self._look_and_wait(names, key)
            if replicas >= self._wanted.replicas:
                infos = {name: told(name, reply) for name, reply in zip(names, replies, strict=True)}
                self._confirmed |= {name: info.last_generated for name, info in infos.items() if info is not None}
                return infos
            if time.monotonic() >= until:
                raise DurabilityUnavailable(
                    str(self._wanted),
                    f"for {self._options.address.deadline_ms} ms {replicas} replicas had all that stream {names[0]!r} "
                    "holds. Nothing was read. Look at the replicas (INFO replication), or ask for fewer.",
                )
            if not told_so:
                told_so = True
                log.warning(
                    "%d replicas have all that stream %r holds: waiting for %s", replicas, names[0], self._wanted
                )

    def _look_and_wait(self, names: Sequence[str], key: bytes) -> tuple[list[Any], int]:
        """XINFO of each, and how many replicas have what it showed."""
        looks: list[Args] = [(b"XINFO", b"STREAM", to_bytes(name)) for name in names]
        wait = (b"WAIT", b"%d" % self._wanted.replicas, b"%d" % self._wanted.timeout_ms)
        renewal = (b"PEXPIRE", key, b"%d" % KEPT_MS)
        batch = Batch([*looks, renewal], key, repeatable=True, same_connection=True, after=wait)
        *infos, renewed, replicas = self._broker.link.call_many(batch)
        if renewed == 0:
            # It is not there yet. Making it is refused by a full server; renewing it is not, so that reading goes on.
            self._make(key, renewal)
            *infos, renewed, replicas = self._broker.link.call_many(batch)
        for reply in (renewed, replicas):
            if isinstance(reply, ErrorReply):
                raise typed(reply)
        return infos, replicas if renewed == 1 else 0

    def _make(self, key: bytes, renewal: Args) -> None:
        batch = Batch([(b"HSET", key, b"asked", b"1"), renewal], key, atomic=True, repeatable=True)
        for reply in self._broker.link.call_many(batch):
            if isinstance(reply, ErrorReply):
                raise typed(reply)


def _key_beside(streams: Sequence[str]) -> bytes:
    """A companion of the first stream that can have any."""
    refused: InvalidArgument | None = None
    for stream in streams:
        try:
            return beside(stream, "replicas")
        except InvalidArgument as error:
            refused = error
    assert refused is not None
    raise refused
