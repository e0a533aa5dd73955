"""What the parts of one subscription share: the settings, the book, and the signals between them. It does nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from millstream.messaging.codecs import Codec
from millstream.messaging.message import Message
from millstream.messaging.settings import SubscriberSettings
from millstream.messaging.subscriber.held import Held
from millstream.messaging.subscriber.lanes import Lanes
from millstream.messaging.subscriber.probation import Probation
from millstream.model import MIN_ID, EntryId

if TYPE_CHECKING:
    from millstream.broker import Broker

log = logging.getLogger(__name__)


def _nobody() -> None:
    pass


class Desk:
    def __init__(
        self,
        broker: Broker,
        topic: str,
        settings: SubscriberSettings,
        codec: Codec,
        certain_until: Callable[[], float] | None = None,
    ) -> None:
        assert settings.group is not None
        self.broker = broker
        self.topic = topic
        self.group = settings.group
        self.consumer = settings.consumer
        self.settings = settings
        self.codec = codec
        self.certain_until = certain_until
        """Until when the stream itself is ours, where it is held by lease."""
        self.held = Held(settings.max_in_flight, settings.max_bytes_in_flight)
        self.probation = Probation(max(1, min(settings.count, settings.max_in_flight // 2)))
        self.lanes = Lanes(settings.key_of) if settings.key_of is not None else None
        self.lost: set[EntryId] = set()
        """Entries that others took over while a handler here was at work on them. They stay in the book until it ends:
        so it is never joined by a second one in the same process."""
        self.last_delivered: EntryId = MIN_ID
        """The greatest id that this process was given: where a vanished group begins again if nothing is held."""
        self.generation = 0
        """How often the group was made again or moved back: so that one fault leads to one repair."""
        self.room_freed = asyncio.Event()
        self.wake_workers: Callable[[], None] = _nobody
        """Something is ready to be started."""

    def valid_until(self, asked_at: float) -> float:
        """Until when what the broker said is certain, if it was asked at ``asked_at`` (monotonic seconds)."""
        return asked_at + self.settings.trusted_ms / 1000

    def lease_is_certain(self, now: float) -> bool:
        return self.certain_until is None or now <= self.certain_until()

    def may_begin(self, message: Message, now: float) -> bool:
        """Whether nobody else can have the entry, nor its stream: what is begun later may be done elsewhere already."""
        return now <= message.valid_until and self.lease_is_certain(now)

    def tell_outputs(self, topic: str, messages: int) -> None:
        if messages:
            self.broker.context.observer("messaging.outputs_published", topic=topic, messages=messages)

    def tell_gone(self, ids: Sequence[EntryId]) -> None:
        """Entries left their stream before this group was done with them: nobody can deliver them again."""
        if ids:
            log.warning("%d pending entries of %s were deleted or trimmed", len(ids), self.topic)
            self.tell("messaging.entries_gone", entries=len(ids))

    def tell(self, name: str, **facts: Any) -> None:
        try:
            self.broker.context.observer(name, topic=self.topic, group=self.group, consumer=self.consumer, **facts)
        except Exception:  # it must not raise; where it does, no message may pay for it with its outcome
            log.exception("the observer failed on %s", name)
