"""One topic as the shared parts see it: its names, its book, and where its reading stands. It asks nobody for anything:
what others were given for it becomes messages in the book, and outcomes where it can never be started.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from millstream.broker import BrokerProtocol
from millstream.messaging.codecs import Codec
from millstream.messaging.errors import Undecodable
from millstream.messaging.failure import OF, is_for, unmarked
from millstream.messaging.handler import Handler
from millstream.messaging.message import Message, Origin
from millstream.messaging.outcome import ACKED, Bury, Outcome
from millstream.messaging.partitions import OutputTopic
from millstream.messaging.settings import SubscriberSettings
from millstream.messaging.subscriber.book import Book
from millstream.messaging.subscriber.room import Room
from millstream.model import MIN_ID, Delivery, EntryId, monotonic_ms
from millstream.wire import Conversation, to_bytes

if TYPE_CHECKING:
    from millstream.messaging.subscriber.shard import Shard

log = logging.getLogger(__name__)

FIRST = b"0-0"
MAX_SCAN = 1000
"""Entries of the pending list that one step looks at: about a millisecond of the server's time."""


@dataclass(slots=True)
class Scan:
    """One way through the pending list, page by page."""

    cursor: bytes = FIRST
    active: bool = True
    restarts: int = 0
    """So that a page that was asked for before a restart is not taken for one of the new scan."""

    def restart(self) -> None:
        self.cursor = FIRST
        self.active = True
        self.restarts += 1


@dataclass(slots=True)
class Outbox:
    """What was said about messages and is not brought about yet."""

    acks: list[Message] = field(default_factory=list)
    """Workers append here themselves, and wake the settler before the first."""
    others: list[tuple[Message, Outcome]] = field(default_factory=list)
    charges: list[Message] = field(default_factory=list)
    steps: dict[asyncio.Task[None], None] = field(default_factory=dict)
    """Those under way beside the settler's own round."""
    under_way: int = 0
    """Rounds that carry acknowledgements of this topic."""

    @property
    def empty(self) -> bool:
        return not (self.acks or self.others or self.charges or self.under_way)


class Topic:
    """``origin`` is whom its messages belong to; ``failed`` is told what ends its reading for good.

    There may be ten thousand, so each is made of few objects: the collector of garbage looks at every set, list and
    event again and again, and handlers wait for it. An empty dict it does not look at.
    """

    def __init__(
        self,
        broker: BrokerProtocol,
        name: str,
        settings: SubscriberSettings,
        codec: Codec,
        origin: Origin,
        failed: Callable[[BaseException], None],
        certain_until: Callable[[], float] | None = None,
    ) -> None:
        assert settings.group is not None
        self.broker = broker
        self.name = name
        self.key = to_bytes(name)
        self.group = settings.group
        self.consumer = settings.consumer
        self.settings = settings
        self.codec = codec
        self.origin = origin
        self.failed = failed
        self.certain_until = certain_until
        """Until when the stream itself is ours, where it is held by lease."""
        self.handler: Handler | None = None
        """None where somebody goes through the messages by hand."""
        self.publish_to: OutputTopic | None = None
        self.book = Book(settings.max_in_flight, settings.max_bytes_in_flight)
        self.outbox = Outbox()
        self.last_delivered: EntryId = MIN_ID
        """The greatest id that this process was given: where a vanished group begins again if nothing is held."""
        self.generation = 0
        """How often the group was made again or moved back: so that one fault leads to one repair."""
        self.group_since = 0.0
        """When this process last joined the group, or saw it put back: whatever it was given since is pending there."""
        self.repairing = asyncio.Lock()
        self.joined = False
        self.closing = False
        """Nothing new is brought back any more; signs of life go on."""
        self.ended = False
        # --- the reader's
        self.shard: Shard | None = None
        self.fetching = False
        """A read without waiting is under way."""
        self.hot = False
        """It has more than one read can bring: it is read without waiting until it has not."""
        self.left_out = False
        """It had no room when the last read was made."""
        self.progress_ms = 0.0
        self.block_ms = settings.read_block_ms
        self.entry_bytes = 0.0
        """A running mean of what entries weigh: it turns the bound in bytes into one in entries before reading."""
        # --- the sweeper's
        self.own = Scan()
        """Entries that the group believes this consumer holds, and that are not in its book."""
        self.sweep = Scan()
        """Entries whose holders gave no sign of life."""
        self.visit_at_ms = 0.0
        self.retire_at_ms = 0.0
        self.no_room = False
        """Something waits to be brought back as soon as there is room for it."""
        self.starved = False
        """It was brought nothing the last time because the process was full: it comes first."""
        self.asked = 0
        """Questions under way that may bring something back."""
        self.unheard_until_ms = 0.0
        """A sweep went unanswered: until then entries may lie under the own name that others had in hand before."""
        # --- the heartbeat's
        self.heartbeat_at_ms = 0.0
        self.told_stuck = False
        # --- the workers'
        self.workers: dict[asyncio.Task[None], None] = {}
        """Tasks that are at work on it now."""
        self.called = False
        """A worker was called and has not come yet: one call is enough."""
        self.wake: Callable[[Topic], None] = _nobody
        """Something is ready to be started."""
        self._changed: asyncio.Event | None = None

    def begin(self, consumer: str, room: Room) -> None:
        """It is read from now on, under this name, within what all topics of the process may hold."""
        settings = self.settings
        self.consumer = consumer
        self.book = Book(
            settings.max_in_flight,
            settings.max_bytes_in_flight,
            max_deliveries=settings.max_deliveries,
            key_of=settings.key_of,
            room_of_all=room,
        )

    @property
    def reading(self) -> bool:
        """A read that names it is under way: there is never a second one, or entries would come out of order."""
        return self.fetching or (self.shard is not None and self.shard.names(self))

    @property
    def ready(self) -> bool:
        """True while reads come back in time. A reader that has silently stopped is not ready, nor one that has no room
        for more because nothing of what it holds is ever settled."""
        patience_ms = self.settings.read_block_ms + self.settings.grace_ms
        progress_ms = self.progress_ms if self.shard is None else max(self.progress_ms, self.shard.progress_ms)
        if not self.joined or self.closing or self.book.stuck:
            return False
        return monotonic_ms() - progress_ms <= patience_ms

    def wake_workers(self) -> None:
        self.wake(self)

    def changed(self) -> None:
        """A worker has left, or messages, or what was said about them is done: whoever closes it looks again."""
        if self._changed is not None:
            self._changed.set()

    async def change(self) -> None:
        """Waits for that."""
        if self._changed is None:
            self._changed = asyncio.Event()
        self._changed.clear()
        await self._changed.wait()

    def talk(self, operation: Callable[..., Conversation[Any]], *args: Any, **options: Any) -> Conversation[Any]:
        """An operation on this stream, for this group and consumer, behind the guard that it may have."""
        return operation(self.broker.context, self.name, self.group, self.consumer, *args, **options)

    async def run(self, operation: Callable[..., Conversation[Any]], *args: Any, **options: Any) -> Any:
        """The same, held now."""
        return await self.broker.run(operation, self.name, self.group, self.consumer, *args, **options)

    @property
    def catching_up(self) -> bool:
        """Older entries than any read can bring lie under the own name, and keys keep their order: those first."""
        return self.own.active and self.book.keeps_order

    # --- what was received becomes messages in the book ---------------------------------------------------------------

    def accept(self, deliveries: Sequence[Delivery], valid_until: float) -> None:
        """New entries, and those whose time has come again."""
        book, decode, origin = self.book, self.codec.decode, self.origin
        entries, ready, in_order = book.entries, book.ready, book.keeps_order
        count = size = 0
        for entry_id, fields, times in deliveries:
            if entry_id in entries:
                book.adopt(entry_id, times or 1, valid_until)
                continue
            assert fields is not None
            if OF in fields and not is_for(fields, to_bytes(self.group)):
                self._pass_over(entry_id, fields, times or 1)
                continue
            try:
                message = decode(unmarked(fields))
                # ``Message.receive`` and ``Book.enter`` in plain stores: every call here is paid by every message.
                message._origin = origin
                message.id = entry_id
                message.times_delivered = times or 1
                message.fields = fields
                message.valid_until = valid_until
                if in_order:
                    book.enter(message)
                    continue
            except Exception as error:
                self._bury_unreadable(entry_id, fields, times or 1, error)
                continue
            message.weight = weight = len(message.payload)
            entries[entry_id] = message
            count += 1
            size += weight
            ready.append(message)
        book.grew(count, size)
        self.weigh(count, size)
        if ready:
            self.wake_workers()

    def accept_taken(self, deliveries: Sequence[Delivery], valid_until: float) -> None:
        """What a sweep took over, in its order, which a key's messages keep. What was handed back in good order is
        like new; the rest goes through probation."""
        for delivery in deliveries:
            entry_id, fields, times = delivery
            if not times:
                self.accept([delivery], valid_until)
                continue
            # Our sign of life was late; or others had it in between, and a handler here is at work on it still.
            if self.book.adopt(entry_id, times, valid_until):
                continue
            assert fields is not None
            if OF in fields and not is_for(fields, to_bytes(self.group)):
                self._pass_over(entry_id, fields, times)
                continue
            try:
                message = self.codec.decode(unmarked(fields))
                self.book.enter(message.receive(self.origin, entry_id, times, fields, valid_until), suspect=True)
            except Exception as error:
                self._bury_unreadable(entry_id, fields, times, error)

    def start_again(self, messages: Iterable[Message], times_delivered: int, valid_until: float) -> None:
        """One more start of the same entries, decoded afresh: the last handler may have changed its message. A suspect
        has met no handler here."""
        book, decode, origin = self.book, self.codec.decode, self.origin
        for message in messages:
            assert message.id is not None
            assert message.fields is not None
            fresh = message if book.is_suspect(message) else decode(unmarked(message.fields))
            fresh.receive(origin, message.id, times_delivered, message.fields, valid_until)
            book.once_more(fresh, message.weight)
        self.wake_workers()

    def _pass_over(self, entry_id: EntryId, fields: dict[bytes, bytes], times: int) -> None:
        """Another group's dead letter, sent round again: this group was done with it the first time."""
        message = Message(b"").receive(self.origin, entry_id, times, fields)
        self.book.hold(message)
        message.settle(ACKED)

    def _bury_unreadable(self, entry_id: EntryId, fields: dict[bytes, bytes], times: int, error: Exception) -> None:
        """Its codec, or the function that names its key, cannot make anything of it: no handler ever will."""
        if not isinstance(error, Undecodable):
            log.error("entry %s of %s cannot be made a message", entry_id, self.name, exc_info=error)
        message = Message(b"").receive(self.origin, entry_id, times, fields)
        self.book.hold(message)
        message.settle(Bury(error))

    # --- how long what was heard is certain ---------------------------------------------------------------------------

    def valid_until(self, asked_at: float) -> float:
        """Until when what the broker said is certain, if it was asked at ``asked_at`` (monotonic seconds)."""
        return asked_at + self.settings.trusted_ms / 1000

    def lease_is_certain(self, now: float) -> bool:
        return self.certain_until is None or now <= self.certain_until()

    def may_begin(self, message: Message, now: float) -> bool:
        """Whether nobody else can have the entry, nor its stream: what is begun later may be done elsewhere already."""
        return now <= message.valid_until and self.lease_is_certain(now)

    # --- how much to ask for ------------------------------------------------------------------------------------------

    def read_count(self, most: int) -> int:
        """How many to ask for: bounded by room, and by bytes as far as past entries tell."""
        count = min(self.settings.count, self.book.room(), most)
        if self.entry_bytes > 0:
            count = min(count, int(self.book.room_bytes() / self.entry_bytes))
        return max(1, count)

    def weigh(self, entries: int, size: int) -> None:
        if entries:
            self.entry_bytes += (size / entries - self.entry_bytes) * 0.3

    def sweep_room(self) -> int:
        return max(0, min(self.book.room(), self.book.probation_room()))

    # --- what is told -------------------------------------------------------------------------------------------------

    def tell_outputs(self, topic: str, messages: int) -> None:
        if messages:
            self.broker.context.observer("messaging.outputs_published", topic=topic, messages=messages)

    def tell_gone(self, ids: Sequence[EntryId]) -> None:
        """Entries left their stream before this group was done with them: nobody can deliver them again."""
        if ids:
            log.warning("%d pending entries of %s were deleted or trimmed", len(ids), self.name)
            self.tell("messaging.entries_gone", entries=len(ids))

    def tell_expired(self, messages: Sequence[Message]) -> None:
        """They were held for too long. A topic that is full of such messages is told about once, until it is not."""
        if messages:
            log.warning(
                "let go of %d messages of %s, the oldest of them %s: nobody settled them within max_hold_ms (%s)",
                *(len(messages), self.name, messages[0].id, self.settings.max_hold_ms),
            )
            self.tell("messaging.hold_expired", entries=len(messages))
        stuck = self.book.stuck
        if stuck and not self.told_stuck:
            log.warning(
                "%s is not read any more: all %d messages that group %s may hold here were let go, and their handlers "
                "have not ended. Find what they wait for, or restart this process",
                *(self.name, len(self.book.entries), self.group),
            )
            self.tell("messaging.stuck", entries=len(self.book.entries))
        self.told_stuck = stuck

    def tell(self, name: str, **facts: Any) -> None:
        try:
            self.broker.context.observer(name, topic=self.name, group=self.group, consumer=self.consumer, **facts)
        except Exception:  # it must not raise; where it does, no message may pay for it with its outcome
            log.exception("the observer failed on %s", name)


def _nobody(topic: Topic) -> None:
    pass
