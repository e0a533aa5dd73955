"""How a subscriber behaves, as one checked value. Defaults follow what users of this field expect."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypedDict

from millstream.errors import InvalidArgument
from millstream.messaging.message import KEY, Message
from millstream.messaging.outcome import AckPolicy
from millstream.model import Backoff, EntryId

if TYPE_CHECKING:
    from millstream.messaging.codecs import Codec

KeyOf = Callable[[Message], str | None]
"""What must stay in order: messages of one key are handled one after the other. None: no order is asked for."""


MAX_IN_FLIGHT = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriberSettings:
    group: str | None
    consumer: str
    group_start: str | None
    """Where a group begins that does not exist yet: "0" everything, "$" from now on, or an id. There is no default:
    a group that silently starts at the end loses messages, one that silently starts at the beginning repeats them."""
    block_ms: int | None = None
    """How long a read waits for entries; topics that are read together wait as long as the most impatient of them.
    None: 5 seconds, or a third of ``claim_min_idle_ms`` where that is less. More than that third is refused: a read
    that is answered so late may bring what is somebody else's by now."""
    count: int = 50
    """Entries a read asks for, at most."""
    max_in_flight: int = MAX_IN_FLIGHT
    """Messages that this consumer holds at a time, waiting or being handled: the bound of its concurrency. No more
    handlers than this run at a time. A read that waits and a sweep that takes over what was abandoned may be answered
    in the same moment: then up to ``count`` messages more are held for a while, and wait."""
    max_bytes_in_flight: int = 64 * 1024 * 1024
    """The same, in bytes of payload. One message may exceed it; it then travels alone. What handlers put out and is not
    stored yet counts too: beyond this no other handler starts."""
    process_max_in_flight: int = 50_000
    """The same for all topics together that this process reads under one group and consumer name."""
    process_max_bytes_in_flight: int = 256 * 1024 * 1024
    claim_min_idle_ms: int = 60_000
    """An entry whose holder gave no sign of life for so long is taken over. Holders give one three times as often."""
    claim_interval_ms: int = 5_000
    """Rest between two rounds of looking for such entries."""
    max_hold_ms: int | None = 12 * 3600 * 1000
    """A message that has no outcome after so long is let go: its handler goes on, and others may take it. None: never.
    Found out by signs of life, so up to half as much later."""
    max_deliveries: int = 5
    """Handler starts. After the last one failed, or never came back, the message is buried."""
    dlq: str | None = None
    """Where to bury; None: beside the stream, which makes burying one atomic step."""
    ack_policy: AckPolicy = AckPolicy.NACK_ON_ERROR
    codec: str = "flat"
    backoff: Backoff = field(default_factory=Backoff)
    key_of: KeyOf | None = None
    dead_consumer_ms: int = 600_000
    """A consumer that was silent for so long, and holds nothing, is removed from the group."""
    grace_ms: int = 5_000
    """A read that is so much later than its block time means a reader that has silently stopped."""
    close_timeout_ms: int = 30_000
    """How long ``close`` waits for handlers that run; then it hands their messages back. A router's and a bus's own
    ``close_timeout_ms`` holds for all of their handlers."""

    def __post_init__(self) -> None:
        _check_group(self)
        if self.block_ms is not None:
            _at_least("block_ms", self.block_ms, 1)
        for name in ("count", "max_in_flight", "max_bytes_in_flight", "claim_min_idle_ms"):
            _at_least(name, getattr(self, name), 1)
        for name in ("process_max_in_flight", "process_max_bytes_in_flight"):
            _at_least(name, getattr(self, name), 1)
        for name in ("claim_interval_ms", "max_deliveries", "dead_consumer_ms", "grace_ms"):
            _at_least(name, getattr(self, name), 1)
        if self.max_hold_ms is not None:
            _at_least("max_hold_ms", self.max_hold_ms, 1)
        _at_least("close_timeout_ms", self.close_timeout_ms, 0)
        if self.group is not None and self.block_ms is not None and self.block_ms > self._longest_block_ms:
            most = f"at most {self._longest_block_ms}, a third of claim_min_idle_ms: raise that too"
            raise InvalidArgument("block_ms", self.block_ms, most)
        if self.dlq is not None and not self.dlq:
            raise InvalidArgument("dlq", self.dlq, "a stream's name, or None for the one beside the stream")

    @property
    def read_block_ms(self) -> int:
        """How long a read waits."""
        return min(5_000, self._longest_block_ms) if self.block_ms is None else self.block_ms

    @property
    def _longest_block_ms(self) -> int:
        return max(1, self.claim_min_idle_ms // 3)

    @property
    def heartbeat_ms(self) -> int:
        shorter = self.claim_min_idle_ms if self.max_hold_ms is None else min(self.claim_min_idle_ms, self.max_hold_ms)
        return max(1, shorter // 3)

    @property
    def trusted_ms(self) -> int:
        """For so long after a sign of life the entry is certainly still ours, whatever the process went through."""
        return max(1, self.claim_min_idle_ms * 3 // 4)


class SubscriberOptions(TypedDict, total=False):
    """What ``Router``, ``Router.on`` and the buses hand on to the subscribers they make. See SubscriberSettings."""

    consumer: str | None
    block_ms: int | None
    count: int
    max_in_flight: int
    max_bytes_in_flight: int
    process_max_in_flight: int
    process_max_bytes_in_flight: int
    claim_min_idle_ms: int
    claim_interval_ms: int
    max_hold_ms: int | None
    max_deliveries: int
    dlq: str | None
    ack_policy: AckPolicy | str
    codec: str | Codec
    backoff: Backoff | None
    ordered_by_key: bool | KeyOf
    dead_consumer_ms: int
    grace_ms: int


class HandlerOptions(SubscriberOptions, total=False):
    """The same, where the handler's group begins, and into how many streams its topic is split."""

    group_start: str | EntryId | None
    partitions: int | None


OPTION_NAMES = frozenset(HandlerOptions.__annotations__) - {"partitions"}


def _check_group(settings: SubscriberSettings) -> None:
    if settings.group is None:
        return
    if not settings.group:
        raise InvalidArgument("group", settings.group, "a name that is not empty, or None for messages to everybody")
    if not settings.consumer:
        raise InvalidArgument("consumer", settings.consumer, "a name that is not empty")
    if settings.group_start is None:
        raise InvalidArgument("group_start", None, "'0' (everything), '$' (from now on) or an id: it has no default")
    parse_start(settings.group_start, "group_start")


STARTS = {"earliest": "0", "beginning": "0", "first": "0", "latest": "$", "end": "$", "last": "$", "now": "$", ">": "$"}
"""What others call it, and what it is here."""


def parse_start(start: str | EntryId, argument: str) -> None:
    """Raises InvalidArgument for what is no place to begin at."""
    if start == "$" or isinstance(start, EntryId):
        return
    try:
        EntryId.parse(start, argument=argument)
    except InvalidArgument:
        meant = STARTS.get(start.lower()) if isinstance(start, str) else None
        hint = "" if meant is None else f"; for {start!r} that is {meant!r}"
        allowed = f"'0' (everything), '$' (from now on), or the id of an entry{hint}"
        raise InvalidArgument(argument, start, allowed) from None


def _at_least(name: str, value: object, least: int) -> None:
    if type(value) is not int or value < least:
        raise InvalidArgument(name, value, f"a whole number of {least} or more")


def default_consumer() -> str:
    """Host and process: telling in every list. A second subscription of a process gets a number behind it."""
    return f"{socket.gethostname()}-{os.getpid()}"


def key_function(ordered_by_key: bool | KeyOf) -> KeyOf | None:
    if ordered_by_key is True:
        return lambda message: message.metadata.get(KEY)
    return ordered_by_key or None


def check_topic(topic: str) -> str:
    if not isinstance(topic, str) or not topic:
        raise InvalidArgument("topic", topic, "a stream's name that is not empty")
    return topic
