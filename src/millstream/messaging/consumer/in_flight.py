"""The in-flight table of one topic: one record per entry, one state per record, one table of transitions. Pure.

An entry is in flight from the moment a read or a claim returns it until the broker has confirmed its outcome.
The record of an entry is its ``Message``: a message exists once per delivery, and a second object per message would
cost more than everything else here. Only this file writes its ``_state``.

Rules:

1. ``TRANSITIONS`` is the only definition of the allowed transitions. The diagram and the table in
   docs/explain/a-message-is-handled.md are generated from it.
   ``add_all``, ``take``, ``settle`` and ``release`` store the next state directly, because every message goes through
   them; the tests hold them to the table.
2. The ready queue, the key queues, the isolated entries, the delayed retries and the unverified entries are indexes
   over the states. Other files call methods and never write them.
3. A pair (state, event) that is not in the table is a bug. ``IllegalTransition`` names the entry, the state and the
   event. Without ``on_illegal`` it is raised. With it, it is reported, and the record is dropped: the entry stays
   pending without heartbeats, so a consumer claims it later, and nothing starts here.
4. The delivery count of an entry is raised in the broker before its handler starts. A read has raised it already. A
   claim has not: claimed entries are counted first, so that a message that kills its process is counted.
"""

from __future__ import annotations

import heapq
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum

from millstream.messaging.consumer.capacity import ProcessCapacity
from millstream.messaging.message import Message
from millstream.messaging.settings import KeyOf
from millstream.model import EntryId

# --- states -----------------------------------------------------------------------------------------------------------


class State(Enum):
    """The state of an in-flight entry. The value is its description in the docs."""

    RECEIVED = "received, and in no queue yet; an entry without a handler is settled from here"
    KEY_QUEUED = "waits behind an older message of its key"
    KEY_QUEUED_CLAIMED = "as KEY_QUEUED, but claimed from a dead consumer: its next delivery is not counted yet"
    READY = "in the ready queue: the next free worker takes it"
    CLAIMED = "claimed from a dead consumer: its delivery will be counted before it starts"
    ISOLATED = "as CLAIMED, and redelivered before: it waits until no other isolated entry of the topic is in flight"
    COUNTING = "its delivery is being counted in the broker; it starts after that"
    UNVERIFIED = "another consumer may have claimed it during a pause: ownership is checked before it starts"
    RUNNING = "its handler has started"
    LOST = "its handler is running, and another consumer has claimed the entry"
    EXPIRED = "its handler is running for longer than max_hold_ms, and the entry was returned to the group"
    SETTLING = "its outcome is known, and the broker has not confirmed it yet"
    SETTLING_LOST = "as SETTLING, but another consumer has claimed the entry: the outcome will be refused"
    DELAYED = "a retry that waits in this process, because later messages of its key wait behind it"
    RELEASED = "no longer in flight"

    # States are compared by identity everywhere, so ``object.__hash__`` is enough. Enum's own hash is a Python function
    # and four times slower.
    __hash__ = object.__hash__


class Event(Enum):
    """What happens to an entry. The value is its description in the docs."""

    ADD = "it is new, a retry that is due, or was returned unstarted"
    ADD_CLAIMED = "it was claimed from a dead consumer"
    ADD_ISOLATED = "it was claimed from a dead consumer, and had been redelivered before"
    QUEUE = "an older message of its key is in flight"
    QUEUE_CLAIMED = "as QUEUE, for an entry claimed from a dead consumer"
    TAKE = "a worker takes it"
    MARK_UNVERIFIED = "a worker could take it, but its ownership is not certain"
    VERIFY = "a heartbeat has confirmed the ownership"
    COUNT = "it may start now: its delivery is counted first"
    REQUEUE = "the delivery was counted, or need not be counted"
    SETTLE = "it gets its outcome"
    DELAY = "the outcome is a retry in this process"
    DELIVER_AGAIN = "a read or a claim returns it once more"
    MARK_LOST = "another consumer has claimed it"
    EXPIRE = "it had no outcome within max_hold_ms"
    RETURN = "unstarted entries are dropped: the subscription closes, or the group was created again"
    RELEASE = "the broker has confirmed its outcome, or this consumer gives it up"

    __hash__ = object.__hash__


RECEIVED, KEY_QUEUED, KEY_QUEUED_CLAIMED = State.RECEIVED, State.KEY_QUEUED, State.KEY_QUEUED_CLAIMED
READY, CLAIMED, ISOLATED, COUNTING = State.READY, State.CLAIMED, State.ISOLATED, State.COUNTING
UNVERIFIED, RUNNING, LOST, EXPIRED = State.UNVERIFIED, State.RUNNING, State.LOST, State.EXPIRED
SETTLING, SETTLING_LOST, DELAYED, RELEASED = State.SETTLING, State.SETTLING_LOST, State.DELAYED, State.RELEASED

_LEAVES = {Event.MARK_LOST: RELEASED, Event.EXPIRE: RELEASED, Event.RETURN: RELEASED, Event.RELEASE: RELEASED}
"""Transitions of every entry whose handler has not started: it leaves this process."""

TRANSITIONS: dict[Enum | None, dict[Event, State]] = {
    RECEIVED: {
        Event.ADD: READY,
        Event.ADD_CLAIMED: CLAIMED,
        Event.ADD_ISOLATED: ISOLATED,
        Event.QUEUE: KEY_QUEUED,
        Event.QUEUE_CLAIMED: KEY_QUEUED_CLAIMED,
        Event.SETTLE: SETTLING,
        Event.DELIVER_AGAIN: RECEIVED,
        Event.RELEASE: RELEASED,
    },
    KEY_QUEUED: {Event.ADD: READY, Event.DELIVER_AGAIN: KEY_QUEUED, **_LEAVES},
    KEY_QUEUED_CLAIMED: {
        Event.ADD_CLAIMED: CLAIMED,
        Event.ADD_ISOLATED: ISOLATED,
        Event.DELIVER_AGAIN: KEY_QUEUED_CLAIMED,
        **_LEAVES,
    },
    READY: {Event.TAKE: RUNNING, Event.MARK_UNVERIFIED: UNVERIFIED, Event.DELIVER_AGAIN: READY, **_LEAVES},
    UNVERIFIED: {Event.VERIFY: READY, Event.DELIVER_AGAIN: UNVERIFIED, **_LEAVES},
    CLAIMED: {Event.COUNT: COUNTING, Event.SETTLE: SETTLING, Event.DELIVER_AGAIN: CLAIMED, **_LEAVES},
    ISOLATED: {Event.COUNT: COUNTING, Event.SETTLE: SETTLING, Event.DELIVER_AGAIN: ISOLATED, **_LEAVES},
    # The reply to the count decides who owns the entry. Until it arrives, a heartbeat with the old count is refused.
    COUNTING: {
        Event.REQUEUE: READY,
        Event.DELIVER_AGAIN: COUNTING,
        Event.MARK_LOST: COUNTING,
        Event.RELEASE: RELEASED,
    },
    RUNNING: {
        Event.SETTLE: SETTLING,
        Event.DELIVER_AGAIN: RUNNING,
        Event.MARK_LOST: LOST,
        Event.EXPIRE: EXPIRED,
        Event.RELEASE: RELEASED,
    },
    # The entry stays until its handler ends; otherwise a redelivery could start a second handler at the same time.
    LOST: {
        Event.SETTLE: SETTLING_LOST,
        Event.DELIVER_AGAIN: RUNNING,
        Event.MARK_LOST: LOST,
        Event.EXPIRE: EXPIRED,
        Event.RELEASE: RELEASED,
    },
    EXPIRED: {
        Event.SETTLE: SETTLING,
        Event.DELIVER_AGAIN: EXPIRED,
        Event.MARK_LOST: EXPIRED,
        Event.RELEASE: RELEASED,
    },
    # The reply to the outcome decides who owns the entry. A heartbeat is also refused after the outcome was applied.
    SETTLING: {
        Event.DELAY: DELAYED,
        Event.DELIVER_AGAIN: SETTLING,
        Event.MARK_LOST: SETTLING,
        Event.RELEASE: RELEASED,
    },
    # The new owner decides whether the entry is retried, so a retry leaves this table.
    SETTLING_LOST: {
        Event.DELAY: RELEASED,
        Event.DELIVER_AGAIN: SETTLING,
        Event.MARK_LOST: SETTLING_LOST,
        Event.RELEASE: RELEASED,
    },
    DELAYED: {
        Event.COUNT: COUNTING,
        Event.REQUEUE: READY,
        Event.DELIVER_AGAIN: DELAYED,
        Event.MARK_LOST: RELEASED,
        Event.RELEASE: RELEASED,
    },
    # A handler that ended after its entry was given up: the outcome is dropped.
    RELEASED: {Event.SETTLE: RELEASED},
}

UNSTARTED = frozenset(state for state, row in TRANSITIONS.items() if Event.RETURN in row)
"""States of entries whose handler has not started in this process."""
NOT_COUNTED = frozenset({CLAIMED, ISOLATED, KEY_QUEUED_CLAIMED, COUNTING})
"""States in which the delivery count does not include the next start of the handler."""
_STARTED = frozenset({RUNNING, LOST, EXPIRED})
_CAN_EXPIRE = frozenset(state for state, row in TRANSITIONS.items() if Event.EXPIRE in row)
_WITHOUT_HEARTBEAT = frozenset({LOST, EXPIRED, SETTLING_LOST})
_LOST_BY_HEARTBEAT = frozenset(
    state for state, row in TRANSITIONS.items() if row.get(Event.MARK_LOST) not in (None, state, EXPIRED)
)

ALWAYS = sys.float_info.max
"""Until when the ownership of a deleted entry is certain. Less than infinity, at which nothing is certain: with it
``take`` starts nothing."""
MAX_SHARED_DELIVERIES = 1
"""A claimed entry with more deliveries than this was redelivered before, and is isolated."""


class IllegalTransition(Exception):
    """A bug of this package: an event that must not happen in this state."""

    def __init__(self, entry_id: EntryId | None, state: Enum | None, event: Event) -> None:
        super().__init__(f"entry {entry_id} in state {state.name if state else None} received event {event.name}")
        self.entry_id = entry_id
        self.state = state
        self.event = event


# --- the table --------------------------------------------------------------------------------------------------------


class InFlight:
    """All entries of one topic that are in flight in this process."""

    __slots__ = (
        "_claimed",
        "_claimed_queue",
        "_delayed",
        "_entries",
        "_gone",
        "_isolated",
        "_isolated_queue",
        "_key_of",
        "_key_queues",
        "_keys",
        "_max_bytes",
        "_max_deliveries",
        "_max_entries",
        "_on_illegal",
        "_outputs",
        "_ready",
        "_unverified",
        "max_claimed",
        "outputs_bytes",
        "process",
        "weight",
    )

    def __init__(
        self,
        max_entries: int,
        max_bytes: int,
        *,
        max_deliveries: int = 5,
        key_of: KeyOf | None = None,
        process: ProcessCapacity | None = None,
        on_illegal: Callable[[IllegalTransition], None] | None = None,
    ) -> None:
        self._entries: dict[EntryId, Message] = {}
        self._ready: deque[Message] = deque()
        self._unverified: dict[EntryId, Message] = {}
        self._claimed_queue: dict[EntryId, Message] = {}
        """Claimed entries that need not run alone, in the order in which they were claimed."""
        self._isolated_queue: list[tuple[int, EntryId, Message]] = []
        """A heap. The lowest delivery count first: innocent entries finish before a poison message is tried again."""
        self._isolated: EntryId | None = None
        """The one isolated entry that is counted, running or settling."""
        self._claimed: dict[EntryId, None] = {}
        """Entries claimed from dead consumers, from their claim until their release."""
        self._delayed: dict[EntryId, bool] = {}
        """Retries that wait in this process; whether their next delivery is counted."""
        self._key_queues: dict[str, deque[Message]] = {}
        """Messages of one key in order. The first one may start."""
        self._keys: dict[EntryId, str] = {}
        self._gone: set[EntryId] = set()
        """Entries that were deleted from the stream: they are not pending, and no consumer can claim them."""
        self._outputs: dict[EntryId, int] = {}
        self.weight = 0
        """Bytes of all payloads in flight."""
        self.outputs_bytes = 0
        """Bytes that handlers produced and that are not stored yet."""
        self.max_claimed = max(1, max_entries // 2)
        """Claimed entries may take half of the capacity: new messages use the other half."""
        self.process = process or ProcessCapacity(1 << 62, 1 << 62)
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._max_deliveries = max_deliveries
        self._key_of = key_of
        self._on_illegal = on_illegal

    # --- reading it ---------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, entry_id: object) -> bool:
        return entry_id in self._entries

    @property
    def has(self) -> Callable[[object], bool]:
        """``in`` for loops over many entries: without a Python call for each."""
        return self._entries.__contains__

    def get(self, entry_id: EntryId) -> Message | None:
        return self._entries.get(entry_id)

    def ids(self) -> list[EntryId]:
        return list(self._entries)

    def messages(self) -> list[Message]:
        return list(self._entries.values())

    def in_state(self, state: State) -> list[EntryId]:
        return [entry_id for entry_id, message in self._entries.items() if message._state is state]

    def holds(self, message: Message) -> bool:
        """Whether this delivery is in flight, not a later delivery of the same entry."""
        return self._entries.get(message.id) is message  # type: ignore[arg-type]  # received: it has an id

    @property
    def keeps_order(self) -> bool:
        return self._key_of is not None

    @property
    def ready(self) -> int:
        return len(self._ready)

    @property
    def unverified(self) -> int:
        return len(self._unverified)

    def has_unsettled(self) -> bool:
        """Whether a handler or the user has a message without an outcome. One that waits for its turn in middleware has
        reached neither."""
        return any(m._outcome is None and m._state in _STARTED and m.begun for m in self._entries.values())

    def oldest(self) -> EntryId | None:
        """The smallest id in flight: every smaller id that this process received is settled."""
        return min(self._entries, default=None)

    def heartbeat_ids(self) -> dict[int, list[EntryId]]:
        """The entries that heartbeats keep owned, by delivery count. Also called by the thread of a blocked loop."""
        gone = self._gone
        return ids_by_count(
            m for m in list(self._entries.values()) if m._state not in _WITHOUT_HEARTBEAT and m.id not in gone
        )

    def return_counts(self, state: State | None = None) -> list[tuple[Message, int]]:
        """All entries, or those in one state, each with the delivery count to return it to the group with."""
        messages = [m for m in self._entries.values() if state is None or m._state is state]
        return [(message, self._return_count(message)) for message in messages]

    def _return_count(self, message: Message) -> int:
        """A start that did not happen is not counted. Middleware may have kept a message from its handler."""
        times = message.times_delivered
        state = message._state
        if state in NOT_COUNTED or (state is DELAYED and self._delayed[message.id]):  # type: ignore[index]
            return times
        started = state not in UNSTARTED and state is not DELAYED and message.begun
        return times if started else max(0, times - 1)

    # --- coming in ----------------------------------------------------------------------------------------------------

    def add_all(self, messages: Mapping[EntryId, Message]) -> int:
        """Adds new messages without keys, by id, none of which is in flight. Returns their bytes."""
        size = 0
        illegal: list[EntryId] = []
        for entry_id, message in messages.items():
            if message._state is not None:
                self._illegal(message, Event.ADD)
                illegal.append(entry_id)
                continue
            message._state = READY
            message.weight = weight = len(message.payload)
            size += weight
        if illegal:
            messages = {entry_id: message for entry_id, message in messages.items() if entry_id not in illegal}
        self._entries.update(messages)
        self._ready.extend(messages.values())
        self._grew(len(messages), size)
        return size

    def add(self, message: Message, *, claimed: bool = False) -> None:
        """Adds a received message. If the function that computes its key raises, the table is unchanged.

        ``claimed``: from a dead consumer. A handler may have started for this delivery, and may have killed it.
        """
        first = self._key_of is None or self._enter_key_queue(message)
        self._receive(message)
        if claimed:
            self._claimed[message.id] = None  # type: ignore[index]  # received: it has an id
        if first:
            self._enqueue(message, claimed=claimed)
        else:
            self._move(message, Event.QUEUE_CLAIMED if claimed else Event.QUEUE)

    def add_unhandled(self, message: Message) -> None:
        """Adds a message to no queue: the caller settles it at once."""
        self._receive(message)

    def _receive(self, message: Message) -> None:
        message._state = RECEIVED
        message.weight = len(message.payload)
        self._entries[message.id] = message  # type: ignore[index]  # received: it has an id
        self._grew(1, message.weight)

    def _grew(self, count: int, size: int) -> None:
        self.weight += size
        self.process.grew(count, size)

    def refresh_delivery(self, entry_id: EntryId, times: int, valid_until: float) -> bool:
        """Called when an entry was delivered to this process again. True if it is in flight: then no second handler
        starts, and the new delivery count lets the broker accept the acknowledgement of the first one.

        A reply that was requested before the last known confirmation changes nothing: on a Cluster a reply may arrive
        late, and the delivery may have been counted meanwhile.
        """
        message = self._entries.get(entry_id)
        if message is None:
            return False
        if times < message.times_delivered and valid_until < message.valid_until:
            return True
        message.times_delivered = times
        message.valid_until = valid_until
        self._move(message, Event.DELIVER_AGAIN)
        return True

    # --- starting -----------------------------------------------------------------------------------------------------

    def take(self, now: float) -> Message | None:
        """The next message to handle; None if no message is ready whose ownership is certain at ``now``.

        After a pause the ownership of waiting messages is not certain. They become unverified: the worker asks for a
        heartbeat, and ``requeue_verified`` or ``mark_lost`` follows."""
        ready = self._ready
        while ready:
            message = ready.popleft()
            if message.valid_until < now:
                if self._move(message, Event.MARK_UNVERIFIED):
                    self._unverified[message.id] = message  # type: ignore[index]  # received: it has an id
                continue
            if message._state is READY:  # as ``_move``, without its call
                message._state = RUNNING
                return message
            self._illegal(message, Event.TAKE)
        return None

    def confirm(self, valid_until: float, ids: Iterable[EntryId]) -> None:
        """Records that the broker confirmed the ownership of these entries, which is certain until ``valid_until``."""
        entries = self._entries
        for entry_id in ids:
            message = entries.get(entry_id)
            if message is not None:
                message.valid_until = valid_until

    def mark_gone(self, ids: Iterable[EntryId]) -> None:
        """Records that these entries were deleted from the stream. Their messages are in memory and are handled,
        because no other consumer can: they need no heartbeats, and their ownership stays certain."""
        for entry_id in ids:
            message = self._entries.get(entry_id)
            if message is not None:
                message.valid_until = ALWAYS
                self._gone.add(entry_id)

    def requeue_verified(self, now: float) -> None:
        """Unverified entries whose ownership is certain at ``now`` start before those that came later."""
        verified = [message for message in self._unverified.values() if message.valid_until >= now]
        for message in verified:
            del self._unverified[message.id]  # type: ignore[arg-type]  # received: it has an id
        self._ready.extendleft(message for message in reversed(verified) if self._move(message, Event.VERIFY))

    # --- counting before a start --------------------------------------------------------------------------------------

    def next_to_count(self) -> tuple[list[Message], list[Message]]:
        """Claimed entries whose delivery is to be counted now, and those that were delivered too often.

        Isolated entries take turns: one per topic until it is released.
        """
        candidates = list(self._claimed_queue.values())
        self._claimed_queue = {}
        if self._isolated is None and self._isolated_queue:
            message = heapq.heappop(self._isolated_queue)[2]
            self._isolated = message.id
            candidates.append(message)
        to_count: list[Message] = []
        exhausted: list[Message] = []
        for message in candidates:
            if message.times_delivered >= self._max_deliveries:
                exhausted.append(message)  # the caller settles it as a dead letter
            elif self._move(message, Event.COUNT):
                to_count.append(message)
        return to_count, exhausted

    def requeue(self, message: Message, fresh: Message) -> bool:
        """Queues ``message`` for its next start, which was counted or need not be counted. ``fresh`` is its new
        delivery, decoded again, or the same object if no handler has received it. False if it is not in flight."""
        if not self.holds(message):
            self.refresh_delivery(fresh.id, fresh.times_delivered, fresh.valid_until)  # type: ignore[arg-type]
            return False
        if self._move(message, Event.REQUEUE) is None:
            return False
        assert message.id is not None
        self._delayed.pop(message.id, None)
        if fresh is not message:
            fresh.weight = message.weight
            message._state = RELEASED
            fresh._state = READY
            self._entries[message.id] = fresh
        fresh.held_since_ms = 0.0
        self._ready.append(fresh)
        return True

    def _is_isolated(self, times: int) -> bool:
        # If few deliveries are allowed, a second crash caused by another entry could be an innocent entry's last one.
        return times > min(MAX_SHARED_DELIVERIES, self._max_deliveries - 2)

    # --- outcomes -----------------------------------------------------------------------------------------------------

    def settle(self, message: Message) -> bool:
        """Records that the message has an outcome. False if its entry was released before: the outcome is dropped."""
        if message._state is RUNNING:  # as ``_move``, without its call
            message._state = SETTLING
            return True
        return self._move(message, Event.SETTLE) in (SETTLING, SETTLING_LOST)

    def delay(self, message: Message, *, counted: bool) -> bool:
        """Keeps a retry in flight, with heartbeats, so that later messages of its key wait for it. False if it is not
        in flight any more, or is released because another consumer has claimed the entry."""
        if not self.holds(message):
            return False
        assert message.id is not None
        new = self._move(message, Event.DELAY)
        if new is DELAYED:
            self._delayed[message.id] = counted
        elif new is RELEASED:
            self._drop([message.id])
        return new is DELAYED

    def delay_over(self, message: Message) -> bool | None:
        """Whether the next delivery of a retry that is due must be counted. None if it is not delayed any more."""
        if not self.holds(message) or message._state is not DELAYED:
            return None
        counted = self._delayed[message.id]  # type: ignore[index]  # received: it has an id
        if counted:
            self._move(message, Event.COUNT)
        return counted

    def add_outputs(self, entry_id: EntryId, size: int) -> None:
        """Adds the bytes that a handler produced. They use capacity until the entry is released."""
        if entry_id in self._entries:
            self._outputs[entry_id] = size
            self.outputs_bytes += size

    @property
    def outputs_full(self) -> bool:
        """Whether outputs that are not stored yet reach the limit in bytes. Then no other handler starts; running
        handlers can still add outputs."""
        return self.outputs_bytes >= self._max_bytes

    # --- leaving ------------------------------------------------------------------------------------------------------

    def release(self, ids: Iterable[EntryId]) -> bool:
        """Removes entries whose outcome the broker has confirmed, or that this consumer gives up. True if claimed
        entries may be counted."""
        ids = ids if isinstance(ids, (list, tuple)) else list(ids)
        entries = self._entries
        left_early = False
        count = size = 0
        for entry_id in ids:
            message = entries.pop(entry_id, None)
            if message is not None:
                if message._state is not SETTLING:
                    left_early = True
                message._state = RELEASED  # from every state: see TRANSITIONS
                count += 1
                size += message.weight
        self.weight -= size
        self.process.shrank(count, size)
        if left_early:
            self._dequeue()
        self._forget(ids)
        return bool(self._claimed_queue or (self._isolated_queue and self._isolated is None))

    def can_be_lost(self, ids: Iterable[EntryId], times: int) -> set[EntryId]:
        """Those of the ids that another consumer has claimed, if a heartbeat with this delivery count was refused for
        them. The other ids are settled, already lost, deleted, or being counted, which also makes the broker refuse
        the old count."""
        lost = set()
        for entry_id in ids:
            message = self._entries.get(entry_id)
            if message is None or entry_id in self._gone:
                continue
            if message.times_delivered == times and message._state in _LOST_BY_HEARTBEAT:
                lost.add(entry_id)
        return lost

    def mark_lost(self, ids: Iterable[EntryId]) -> list[EntryId]:
        """Records that another consumer has claimed these entries. Entries without a running handler are released, and
        their ids are returned. The others stay until their handler ends, and the broker will refuse their outcome."""
        released = []
        for entry_id in sorted(ids):  # later messages of their keys may start in this order
            message = self._entries.get(entry_id)
            if message is not None and self._move(message, Event.MARK_LOST) is RELEASED:
                released.append(entry_id)
        self._drop(released)
        return released

    def expire(self, now_ms: float, max_hold_ms: float) -> list[tuple[Message, int]]:
        """Returns the entries without an outcome after ``max_hold_ms``, each with the delivery count to return it with.

        Called before each heartbeat. The time begins at the first call after the entry came in flight. Unstarted
        entries are released."""
        late: list[tuple[Message, int]] = []
        released: list[EntryId] = []
        for entry_id, message in self._entries.items():
            if not message.held_since_ms:
                message.held_since_ms = now_ms
            if now_ms - message.held_since_ms < max_hold_ms or message._state not in _CAN_EXPIRE:
                continue
            late.append((message, self._return_count(message)))
            if self._move(message, Event.EXPIRE) is RELEASED:
                released.append(entry_id)
        self._drop(sorted(released))
        return late

    def return_unstarted(self) -> list[tuple[Message, int]]:
        """Releases and returns all unstarted entries, each with the delivery count to return it with."""
        unstarted = [(m, self._return_count(m)) for m in self._entries.values() if m._state in UNSTARTED]
        for message, _ in unstarted:
            self._move(message, Event.RETURN)
        self._drop([message.id for message, _ in unstarted if message.id is not None], start_next=False)
        return unstarted

    def _drop(self, ids: Iterable[EntryId], *, start_next: bool = True) -> None:
        """Removes records whose state is RELEASED by now."""
        count = size = 0
        ids = list(ids)
        for entry_id in ids:
            message = self._entries.pop(entry_id)
            count += 1
            size += message.weight
        if not count:
            return
        self.weight -= size
        self.process.shrank(count, size)
        self._dequeue()
        self._forget(ids, start_next=start_next)

    def _dequeue(self) -> None:
        """Removes released records from every queue of entries that may start."""
        if any(message._state is not READY for message in self._ready):
            ready = [message for message in self._ready if message._state is READY]
            self._ready.clear()
            self._ready.extend(ready)
        for index, state in ((self._unverified, UNVERIFIED), (self._claimed_queue, CLAIMED)):
            for entry_id in [entry_id for entry_id, message in index.items() if message._state is not state]:
                del index[entry_id]
        if any(message._state is not ISOLATED for _, _, message in self._isolated_queue):
            self._isolated_queue = [place for place in self._isolated_queue if place[2]._state is ISOLATED]
            heapq.heapify(self._isolated_queue)

    def _forget(self, ids: Iterable[EntryId], *, start_next: bool = True) -> None:
        """Removes ids from the indexes, and queues the messages that waited behind them."""
        if self._outputs:
            for entry_id in ids:
                self.outputs_bytes -= self._outputs.pop(entry_id, 0)
        if self._delayed:
            for entry_id in ids:
                self._delayed.pop(entry_id, None)
        if self._gone:
            self._gone.difference_update(ids)
        if self._keys:
            for entry_id in ids:
                following = self._leave_key_queue(entry_id)
                if start_next and following is not None and following._state is not RELEASED:
                    self._enqueue(following, claimed=following._state is KEY_QUEUED_CLAIMED)
        if self._claimed:
            for entry_id in ids:
                self._claimed.pop(entry_id, None)
        if self._isolated is not None and self._isolated not in self._entries:
            self._isolated = None

    # --- capacity -----------------------------------------------------------------------------------------------------

    def capacity(self) -> int:
        """How many more entries may be in flight, within both limits. An empty topic accepts an entry of any size."""
        if self.weight + self.outputs_bytes >= self._max_bytes:
            return 0
        return self._max_entries - len(self._entries)

    def capacity_bytes(self) -> int:
        return max(0, self._max_bytes - self.weight - self.outputs_bytes)

    def claim_capacity(self) -> int:
        """How many entries may be claimed from dead consumers now."""
        return max(0, min(self.capacity(), self.max_claimed - len(self._claimed)))

    @property
    def stuck(self) -> bool:
        """Whether the topic has no capacity, and all its entries are expired: it is not read until a handler ends."""
        if self.capacity() > 0 and self.process.free() > 0:
            return False
        return bool(self._entries) and all(message._state is EXPIRED for message in self._entries.values())

    # --- transitions --------------------------------------------------------------------------------------------------

    def _enqueue(self, message: Message, *, claimed: bool) -> None:
        """Queues a message that may start: no earlier message of its key is in flight."""
        if not claimed:
            if self._move(message, Event.ADD):
                self._ready.append(message)
        elif self._is_isolated(message.times_delivered):
            if self._move(message, Event.ADD_ISOLATED):
                heapq.heappush(self._isolated_queue, (message.times_delivered, message.id, message))  # type: ignore[misc]
        elif self._move(message, Event.ADD_CLAIMED):
            self._claimed_queue[message.id] = message  # type: ignore[index]  # received: it has an id

    def _move(self, message: Message, event: Event) -> State | None:
        new = TRANSITIONS[message._state].get(event)
        if new is None:
            self._illegal(message, event)
        else:
            message._state = new
        return new

    def _illegal(self, message: Message, event: Event) -> None:
        error = IllegalTransition(message.id, message._state, event)
        if self._on_illegal is None:
            raise error
        self._on_illegal(error)
        if self.holds(message):
            message._state = RELEASED
            self._drop([message.id])  # type: ignore[list-item]  # received: it has an id

    # --- keys ---------------------------------------------------------------------------------------------------------

    def _enter_key_queue(self, message: Message) -> bool:
        """True if it may start now; False if it waits behind another message of its key."""
        assert self._key_of is not None
        assert message.id is not None
        key = self._key_of(message)
        if key is None:
            return True
        queue = self._key_queues.setdefault(key, deque())
        queue.append(message)
        self._keys[message.id] = key
        return len(queue) == 1

    def _leave_key_queue(self, entry_id: EntryId) -> Message | None:
        """Removes an entry from its key queue. Returns the message that may start now, or None."""
        key = self._keys.pop(entry_id, None)
        if key is None:
            return None
        queue = self._key_queues[key]
        was_first = queue[0].id == entry_id
        for message in queue:
            if message.id == entry_id:
                queue.remove(message)
                break
        if not queue:
            del self._key_queues[key]
            return None
        return queue[0] if was_first else None


def messages_by_count(messages: Iterable[Message]) -> dict[int, list[Message]]:
    groups: dict[int, list[Message]] = {}
    for message in messages:
        groups.setdefault(message.times_delivered, []).append(message)
    return groups


def ids_by_count(messages: Iterable[Message]) -> dict[int, list[EntryId]]:
    groups: dict[int, list[EntryId]] = {}
    for message in messages:
        assert message.id is not None
        ids = groups.get(message.times_delivered)
        if ids is None:
            groups[message.times_delivered] = [message.id]
        else:
            ids.append(message.id)
    return groups


def ids_by_counts(messages: Iterable[tuple[Message, int]]) -> dict[tuple[int, int], list[EntryId]]:
    """Ids by their delivery count and the one that they are returned with."""
    groups: dict[tuple[int, int], list[EntryId]] = {}
    for message, leaving in messages:
        assert message.id is not None
        groups.setdefault((message.times_delivered, leaving), []).append(message.id)
    return groups


def all_transitions() -> Iterator[tuple[State, Event, State]]:
    """Every transition, for the documentation and the tests."""
    for state, row in TRANSITIONS.items():
        assert isinstance(state, State)
        for event, new in row.items():
            yield state, event, new
