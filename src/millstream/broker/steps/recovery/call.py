"""Deliveries that come again: what was abandoned, and what was put off and is due."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from millstream.broker.context import Context
from millstream.broker.keys import beside, due_key
from millstream.broker.operations.conversion import (
    Name,
    bound_word,
    count_word,
    counted_deliveries,
    entry_ids,
    id_words,
    name_word,
    sequence,
)
from millstream.broker.steps.script import run_script, script
from millstream.model import Delivery, EntryId
from millstream.wire import Conversation


class Swept(NamedTuple):
    """One page of the pending list. Pass ``cursor`` to the next call; ``finished`` says that it came round."""

    cursor: bytes
    finished: bool
    deliveries: list[Delivery]
    gone: list[EntryId]
    """Pending entries that were deleted or trimmed: nobody can handle them any more."""


class Due(NamedTuple):
    deliveries: list[Delivery]
    next_ms: int | None
    """Milliseconds until the next one is due; None when nothing waits."""
    gone: list[EntryId]
    """Delayed entries that were deleted or trimmed while they waited: nobody can handle them any more."""


class Visit(NamedTuple):
    """What one stream needs."""

    sweep: bool
    """Something may be abandoned."""
    due_ms: int | None
    """Milliseconds until ``take_due`` finds something; None when nothing waits."""
    later_ms: int | None
    """The same for ``publish_due``."""


def sweep(
    context: Context,
    stream: Name,
    group: Name,
    consumer: Name,
    *,
    min_idle_ms: int,
    cursor: bytes = b"0-0",
    scan: int = 1000,
    room: int = 100,
    max_bytes: int = 1 << 40,
    owner: Name | None = None,
    but: Sequence[EntryId] = (),
) -> Conversation[Swept]:
    """Takes over what nobody has touched for ``min_idle_ms``, on one page of the pending list.

    Looks at ``scan`` entries at most, those of ``owner`` alone where it is given, and takes ``room`` at most; the
    cursor stops where room ended. Delivery counts stay and are told; only what was handed back (told as 0) counts as
    delivered once from now on. Delayed entries are left alone, and so are those in ``but``. Raises NoSuchGroup.
    """
    key, name = name_word(stream, "stream"), name_word(group, "group")
    argv = (
        *(
            name,
            name_word(consumer, "consumer"),
            count_word(min_idle_ms, "min_idle_ms", least=0),
            bound_word(cursor, "cursor"),
        ),
        *(count_word(scan, "scan"), count_word(room, "room", least=0), count_word(max_bytes, "max_bytes", least=0)),
        *(b"" if owner is None else name_word(owner, "owner"), *id_words(but, "but")),
    )
    reply = yield from run_script(script("sweep"), (key, due_key(key, name)), argv, guard=context.guard)
    return Swept(bytes(reply[0]), reply[0] == b"0-0", counted_deliveries(reply[1]), entry_ids(reply[2]))


def needs_visit(
    context: Context, streams: Sequence[Name], group: Name, *, min_idle_ms: int, scan: int = 1000
) -> Conversation[dict[int, Visit]]:
    """Which of many streams have work that nobody is at, by their place in ``streams``; the others are left out.

    One step over all of them, which on a cluster share a slot. Reads only.
    """
    name = name_word(group, "group")
    words = [name_word(stream, "streams") for stream in sequence(streams, "streams", "streams")]
    keys = [key for word in words for key in (word, due_key(word, name), beside(word, "later"))]
    argv = (name, count_word(min_idle_ms, "min_idle_ms", least=0), count_word(scan, "scan"))
    if not keys:
        return {}
    reply = yield from run_script(script("needs_visit"), keys, argv, repeatable=True)
    return {
        number: Visit(bool(sweep), None if due < 0 else int(due), None if later < 0 else int(later))
        for number, sweep, due, later in reply
    }


def take_due(
    context: Context, stream: Name, group: Name, consumer: Name, *, room: int = 100, max_bytes: int = 1 << 40
) -> Conversation[Due]:
    """Delivers again what was delayed and is due; each counts as one more delivery. Raises NoSuchGroup.

    What was acknowledged while it waited is forgotten. What was deleted or trimmed is taken off the pending list, and
    told.
    """
    key, name = name_word(stream, "stream"), name_word(group, "group")
    argv = (
        *(name, name_word(consumer, "consumer")),
        *(count_word(room, "room", least=0), count_word(max_bytes, "max_bytes", least=0)),
    )
    reply = yield from run_script(script("due_take"), (key, due_key(key, name)), argv, guard=context.guard)
    return Due(counted_deliveries(reply[0]), None if reply[1] < 0 else int(reply[1]), entry_ids(reply[2]))
