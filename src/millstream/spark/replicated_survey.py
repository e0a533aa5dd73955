"""What the driver sees of streams for ``durability=replicated(n)``: nothing that n replicas do not hold.

A primary shows entries that no replica has yet. Read and copied, they would be gone after a failover, others would take
their ids, and the query would have to stop: what it has read is no longer what the stream holds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any

from millstream.broker import BlockingBroker, beside, typed
from millstream.errors import DurabilityUnavailable, InvalidArgument
from millstream.model import Durability, EntryId, StreamInfo
from millstream.spark.options import SourceOptions
from millstream.spark.survey import RedisSurvey, told
from millstream.wire import Args, Batch, ErrorReply, to_bytes

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
