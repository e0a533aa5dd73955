"""What servers answer, turned into the values of ``model/``. Written for RESP2 shapes, which both links deliver."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from json import loads
from typing import Any

from millstream.broker.bulk import gc_paused
from millstream.model import Delivery, Entry, EntryId
from millstream.wire import ErrorReply, to_name

_new = tuple.__new__

MANY = 500
"""Ids that Python's collector would search for garbage while they are made, about once for every 700 objects."""


def entry_id(raw: bytes) -> EntryId:
    """An id that a server wrote: no need to doubt its form."""
    ms, _, seq = raw.partition(b"-")
    return _new(EntryId, (int(ms), int(seq)))


def entry_ids(raws: Sequence[bytes]) -> list[EntryId]:
    """Many of them, without a step of Python for each: as one JSON array, whose numbers are read in C."""
    numbers = iter(loads(b"[%b]" % b",".join(raws).replace(b"-", b",")))
    made = map(_new, repeat(EntryId), zip(numbers, numbers, strict=True))
    if len(raws) < MANY:
        return list(made)
    with gc_paused():
        return list(made)


def ids_or_errors(replies: list[Any]) -> list[Any]:
    """XADD's replies: ids, and error replies as they are."""
    try:
        return entry_ids(replies)
    except TypeError:
        return [reply if isinstance(reply, ErrorReply) else entry_id(reply) for reply in replies]


def fields_of(flat: list[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def entries(reply: Any) -> list[Entry]:
    return list(map(_new, repeat(Entry), zip(entry_ids([raw for raw, _ in reply]), _all_fields(reply), strict=True)))


def deliveries(reply: Any) -> list[Delivery]:
    """A deleted entry of one's own history has no fields: None."""
    ids = entry_ids([raw for raw, _ in reply])
    return list(map(_new, repeat(Delivery), zip(ids, _all_fields(reply), repeat(None))))


def _all_fields(reply: Any) -> list[dict[bytes, bytes] | None]:
    try:
        return [{name: value} for _, (name, value) in reply]  # one field each: the most common shape, and the quickest
    except (TypeError, ValueError):
        pass
    try:
        return [{a: b, c: d} for _, (a, b, c, d) in reply]  # two fields: a message of the default codec
    except (TypeError, ValueError):
        return [fields_of(flat) if flat else None for _, flat in reply]


def by_stream(reply: Any) -> list[tuple[str, Any]]:
    """XREAD's and XREADGROUP's shape: pairs of a stream and its items; a null when there was nothing."""
    return [(to_name(name), items) for name, items in reply] if reply else []


def mapping(flat: Any) -> dict[bytes, Any]:
    """Keys and values in turn."""
    return dict(zip(flat[::2], flat[1::2], strict=True))
