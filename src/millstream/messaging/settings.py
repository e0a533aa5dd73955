"""The settings of a subscriber, checked."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypedDict

from millstream.broker import companion_key
from millstream.errors import InvalidArgument
from millstream.messaging.message import KEY, Message
from millstream.messaging.outcome import AckPolicy
from millstream.model import Backoff, EntryId
from millstream.wire import to_bytes

if TYPE_CHECKING:
    from millstream.messaging.codecs import Codec
    from millstream.messaging.retention import RetentionPolicy

KeyOf = Callable[[Message], str | None]
"""The key of a message: messages of one key are handled one after the other. None: without order."""


MAX_IN_FLIGHT = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriberSettings:
    group: str | None
    consumer: str
    group_start: str | None
    """Where a group begins that does not exist yet: "0" everything, "$" from now on, or an id. There is no default:
    a group that silently starts at the end loses messages, one that silently starts at the beginning repeats them."""
    block_ms: int | None = None
    """How long a read waits for entries. Topics that are read together wait as long as the smallest of their values.
    None: 5 seconds, or a third of ``claim_min_idle_ms`` if that is less. More than that third is refused: a reply that
    arrives so late may contain entries that another consumer has claimed."""
    count: int = 50
    """The largest number of entries that one read asks for."""
    max_in_flight: int = MAX_IN_FLIGHT
    """Messages of a topic that may be in flight in this process, waiting or being handled. It limits the concurrency:
    no more handlers than this run at a time."""
    max_bytes_in_flight: int = 64 * 1024 * 1024
    """The bytes of payload that a topic may have in flight. One message may exceed it and is then in flight alone.
    Outputs of handlers that
    are not stored yet count too: beyond this limit no other handler starts."""
    process_max_in_flight: int = 50_000
    """The limit in messages for all topics together that this process reads under one group and consumer name."""
    process_max_bytes_in_flight: int = 256 * 1024 * 1024
    claim_min_idle_ms: int = 60_000
    """An entry whose consumer sent no heartbeat for so long is claimed. Heartbeats are sent three times as often."""
    claim_interval_ms: int = 5_000
    """Interval between two searches for such entries."""
    max_hold_ms: int | None = 12 * 3600 * 1000
    """A message without an outcome after so long is returned to the group: its handler continues, and another consumer
    may claim the entry. None: never. Checked with each heartbeat, so up to half a heartbeat interval later."""
    max_deliveries: int = 5
    """Deliveries of a message. If the last one failed or did not end, the message is dead-lettered."""
    dlq: str | None = None
    """The dead-letter stream. None: the companion key of the stream, so that dead-lettering is one atomic step."""
    ack_policy: AckPolicy = AckPolicy.NACK_ON_ERROR
    codec: str = "flat"
    backoff: Backoff = field(default_factory=Backoff)
    key_of: KeyOf | None = None
    dead_consumer_ms: int = 600_000
    """A consumer without activity for so long, and without pending entries, is removed from the group."""
    grace_ms: int = 5_000
    """If a read returns so much later than its block time, its connection counts as broken."""
    close_timeout_ms: int = 30_000
    """How long ``close`` waits for running handlers; then it returns their messages to the group. ``close_timeout_ms``
    of a router or a bus applies to all of their handlers."""

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
            allowed = f"at most {self._longest_block_ms}, a third of claim_min_idle_ms: raise that too"
            raise InvalidArgument("block_ms", self.block_ms, allowed)
        if self.dlq is not None and not self.dlq:
            raise InvalidArgument("dlq", self.dlq, "the name of a stream, or None for the companion key of the stream")

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
        """The time after a heartbeat within which no other consumer can claim the entry, even if this process was
        paused."""
        return max(1, self.claim_min_idle_ms * 3 // 4)


class RetentionOptions(TypedDict, total=False):
    """How long the stream of a handler keeps its entries. See ``millstream.messaging.retention``."""

    keep: str | RetentionPolicy | None
    """A duration such as "7d", or a RetentionPolicy; entries that a group needs stay. None: everything is kept."""
    delete_acked: bool
    """Entries are deleted once every group has acknowledged them. A group that is created later does not see them."""


class SubscriberOptions(RetentionOptions, total=False):
    """Options that ``Router``, ``Router.on`` and the buses pass to their subscribers. See SubscriberSettings."""

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
    """As SubscriberOptions, with the start of the handler's group and the number of partitions of its topic."""

    group_start: str | EntryId | None
    partitions: int | None


OPTION_NAMES = frozenset(HandlerOptions.__annotations__) - {"partitions"}


def _check_group(settings: SubscriberSettings) -> None:
    if settings.group is None:
        return
    if not settings.group:
        raise InvalidArgument("group", settings.group, "a name that is not empty, or None for fanout")
    if not settings.consumer:
        raise InvalidArgument("consumer", settings.consumer, "a name that is not empty")
    _check_encodable("group", settings.group)
    _check_encodable("consumer", settings.consumer)
    if settings.group_start is None:
        raise InvalidArgument("group_start", None, "'0' (everything), '$' (from now on) or an id: it has no default")
    parse_start(settings.group_start, "group_start")


STARTS = {"earliest": "0", "beginning": "0", "first": "0", "latest": "$", "end": "$", "last": "$", "now": "$", ">": "$"}
"""Names of start positions in other libraries, and the value for each."""


def parse_start(start: str | EntryId, argument: str) -> None:
    """Raises InvalidArgument for a value that is not a start position."""
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


_process_suffix: list[str] = []
"""Random, drawn once per process. Empty until the first name is made, and again in the child of a fork."""
os.register_at_fork(after_in_child=_process_suffix.clear)


def default_consumer() -> str:
    """Host, process id and a random suffix, the same for the life of this process.

    Host and process id alone are not unique: containers that share a host name all run as process 1. A second
    subscription of a process gets a number appended.
    """
    if not _process_suffix:
        _process_suffix.append(os.urandom(4).hex())
    return f"{socket.gethostname()}-{os.getpid()}-{_process_suffix[0]}"


def is_default_consumer(name: str) -> bool:
    """Whether only this process can use the name: it was generated here, and is not a ``consumer=`` of the user."""
    own = default_consumer()
    return name == own or name.startswith(f"{own}-")


def key_function(ordered_by_key: bool | KeyOf) -> KeyOf | None:
    if ordered_by_key is True:
        return lambda message: message.metadata.get(KEY)
    return ordered_by_key or None


def check_topic(topic: str) -> str:
    if not isinstance(topic, str) or not topic:
        raise InvalidArgument("topic", topic, "a stream's name that is not empty")
    _check_encodable("topic", topic)
    return topic


def _check_encodable(argument: str, name: str) -> None:
    try:
        to_bytes(name)
    except UnicodeEncodeError:
        raise InvalidArgument(argument, name, "a name without half a character (a lone surrogate)") from None


def check_group_topic(topic: str) -> str:
    """A topic that a group reads has companion keys (delays, dead letters). A name that can have none is refused here:
    it would fail every step that handles many topics of the group in one call."""
    check_topic(topic)
    try:
        companion_key(topic, "dlq")
    except InvalidArgument as error:
        raise InvalidArgument("topic", topic, "a name without '}', or with a hash tag such as {orders}") from error
    return topic
