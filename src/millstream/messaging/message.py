"""The message that a producer publishes and a handler receives. A received message is settled exactly once.

Settling a message sets the outcome of its delivery; the subscription that delivered it applies the outcome, in batches.
"""

from __future__ import annotations

import os
from enum import Enum
from typing import Protocol
from uuid import NAMESPACE_URL, uuid5

from millstream.errors import InvalidArgument
from millstream.messaging.errors import AlreadySettled, Rejected, check_delay
from millstream.messaging.outcome import ACKED, DeadLetterOutcome, Outcome, Retry
from millstream.model import EntryId

KEY = "key"
"""The metadata with the key whose messages stay in order (an account, an order number)."""


class Origin(Protocol):
    """Where a message was received: topic, group and consumer, and the object that takes its outcome."""

    topic: str
    group: str | None
    consumer: str | None

    def settle(self, message: Message, outcome: Outcome) -> None:
        """Queues the outcome without waiting. Raises if this origin cannot apply it."""


class Message:
    """A payload, its metadata, and a uuid that stays the same over all of its deliveries.

    On a received one ``topic``, ``id``, ``group``, ``consumer`` and ``times_delivered`` (handler starts, this one
    included) say where it came from, and ``fields`` is the entry as it is stored in the stream.
    """

    __slots__ = (
        "_origin",
        "_outcome",
        "_state",
        "_uuid",
        "begun",
        "fields",
        "held_since_ms",
        "id",
        "metadata",
        "payload",
        "times_delivered",
        "valid_until",
        "weight",
    )

    def __init__(self, payload: bytes, metadata: dict[str, str] | None = None, uuid: str | None = None) -> None:
        if type(payload) is not bytes:
            if not isinstance(payload, (bytes, bytearray, memoryview)):
                raise InvalidArgument("payload", payload, "bytes, or a marshaler that makes bytes of it")
            payload = bytes(payload)
        self.payload = payload
        self.metadata: dict[str, str] = {} if metadata is None else metadata
        self._uuid = uuid
        self.id: EntryId | None = None
        self.times_delivered = 0
        self.fields: dict[bytes, bytes] | None = None
        self.valid_until = 0.0
        """Until then (monotonic seconds) no other consumer can have claimed the entry. Written by the subscription."""
        self.weight = 0
        """Its size in the in-flight table, in bytes, even if a handler changes the payload."""
        self.begun = True
        """False while middleware delays the call of its handler: if it is returned then, its delivery is not
        counted."""
        self.held_since_ms = 0.0
        """When the first heartbeat included it, in monotonic milliseconds; 0: none has. Written by the subscription."""
        self._origin: Origin | None = None
        self._outcome: Outcome | None = None
        self._state: Enum | None = None
        """Its state in the in-flight table of its topic, which alone writes it. None: it was never in flight."""

    @property
    def uuid(self) -> str:
        if self._uuid is None:
            # An entry without a uuid gets one from its stream and id, so that all its deliveries have the same.
            self._uuid = new_uuid() if self.id is None else str(uuid5(NAMESPACE_URL, f"{self.topic}/{self.id}"))
        return self._uuid

    @property
    def key(self) -> str | None:
        return self.metadata.get(KEY)

    @property
    def topic(self) -> str | None:
        return self._origin.topic if self._origin is not None else None

    @property
    def group(self) -> str | None:
        return self._origin.group if self._origin is not None else None

    @property
    def consumer(self) -> str | None:
        return self._origin.consumer if self._origin is not None else None

    @property
    def settled(self) -> Outcome | None:
        """The outcome of this delivery; None while it has none."""
        return self._outcome

    async def ack(self) -> None:
        """Acknowledges the message. It is queued at once and sent a moment later with the next batch.

        After a crash in that moment the message is redelivered. Closing the subscriber sends queued acknowledgements.
        Raises AlreadySettled.
        """
        self.settle(ACKED)

    async def nack(self, delay_ms: int | None = None, error: BaseException | None = None) -> None:
        """Redelivers the message after ``delay_ms`` (None: the subscriber's backoff), up to ``max_deliveries`` times.

        The delay may be longer than the time after which idle entries are claimed. Raises AlreadySettled.
        """
        self.settle(Retry(check_delay(delay_ms), error))

    async def reject(self, reason: str | BaseException) -> None:
        """Dead-letters the message: it goes to the dead-letter stream with the reason. Raises AlreadySettled."""
        self.settle(DeadLetterOutcome(reason if isinstance(reason, BaseException) else Rejected(reason)))

    def settle(self, outcome: Outcome) -> None:
        """The only place where a delivery gets its outcome. A message that was never received only stores it."""
        if self._outcome is not None:
            raise AlreadySettled(self.uuid, type(self._outcome).__name__.lower())
        if self._origin is not None:
            self._origin.settle(self, outcome)
        self._outcome = outcome

    def mark_settled(self, outcome: Outcome) -> None:
        """Records an outcome that was applied already, without passing it to the origin."""
        self._outcome = outcome

    def receive(
        self,
        origin: Origin,
        id: EntryId,
        times_delivered: int = 1,
        fields: dict[bytes, bytes] | None = None,
        valid_until: float = 0.0,
    ) -> Message:
        """Marks it as received, and returns it. Called by readers of streams, and by tests of handlers."""
        self._origin = origin
        self.id = id
        self.times_delivered = times_delivered
        self.fields = fields
        self.valid_until = valid_until
        return self

    def copy(self) -> Message:
        """The same payload, metadata and uuid, without an origin: to be published, not settled."""
        return Message(self.payload, dict(self.metadata), self.uuid)

    def __repr__(self) -> str:
        payload = self.payload if len(self.payload) <= 40 else self.payload[:37] + b"..."
        where = f", topic={self.topic!r}, id='{self.id}'" if self.id is not None else ""
        return f"Message({payload!r}, uuid={self.uuid!r}{where})"


_block: list[str] = []
"""Uuids that are ready for use, last first."""
os.register_at_fork(after_in_child=_block.clear)  # or parent and child would use the same ones
_LAST_DIGITS = [f"{number:02x}" for number in range(255, -1, -1)]


def new_uuid() -> str:
    """A UUID in the form of version 4, as text: unique, not secret.

    Generated in blocks that share 114 random bits and differ in their last digits, in a tenth of the time of the
    standard library, whose uuids take longer than everything else in a publish.
    """
    if not _block:
        h = os.urandom(16).hex()
        head = f"{h[:8]}-{h[8:12]}-4{h[13:16]}-{'89ab'[int(h[16], 16) & 3]}{h[17:20]}-{h[20:30]}"
        _block.extend([head + digits for digits in _LAST_DIGITS])
    return _block.pop()
