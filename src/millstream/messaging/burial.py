"""How a dead letter is written: the entry's own fields, and beside them what happened, under names that start with
``dlq.``. Whoever replays it takes those away again, and has the entry as it was; and how a replayed entry is marked,
under names that start with ``replay.``, which no codec sees. Pure.

``replay.of`` is the id of the entry that it stands for: to whoever remembers entries, it is that one. ``replay.group``
is the one group of this stream that it is meant for; groups that handled it the first time pass it over. In another
stream nobody has handled it, and a mark would keep everybody away.
"""

from __future__ import annotations

from dataclasses import dataclass

from millstream.messaging.failure import text_of, traceback_of, type_of

PREFIX = b"dlq."


@dataclass(frozen=True, slots=True)
class Burial:
    """Why and where from. ``deliveries`` counts handler starts."""

    stream: str
    original_id: str
    group: str
    consumer: str
    deliveries: int
    error: str
    error_type: str
    traceback: str
    buried_at_ms: int

    def fields(self) -> dict[bytes, bytes]:
        """As it lies beside the entry's own fields."""
        return {PREFIX + name.encode(): _encoded(str(getattr(self, name))) for name in self.__slots__}


def describe(error: BaseException) -> tuple[str, str, str]:
    """Message, type and traceback of an error."""
    return text_of(error), type_of(error), traceback_of(error)


def _encoded(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # half a character, as JSON can hold it: no bytes stand for that
        return text.encode("utf-8", "backslashreplace")


def bury_with(fields: dict[bytes, bytes], burial: Burial) -> dict[bytes, bytes]:
    """The dead letter's fields. Burying a dead letter again keeps the entry's fields and the latest reason."""
    return {**original(fields), **burial.fields()}


def original(fields: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """The entry's own fields, as its producer wrote them."""
    return {name: value for name, value in fields.items() if not name.startswith(PREFIX)}


def read_burial(fields: dict[bytes, bytes]) -> Burial | None:
    """What a dead letter tells about itself; None where it carries no such fields."""
    told = {
        name[len(PREFIX) :].decode("utf-8", "surrogateescape"): value.decode("utf-8", "surrogateescape")
        for name, value in fields.items()
        if name.startswith(PREFIX)
    }
    if "original_id" not in told:
        return None

    def number(name: str) -> int:
        text = told.get(name, "0")
        return int(text) if text.isdecimal() else 0

    return Burial(
        stream=told.get("stream", ""),
        original_id=told["original_id"],
        group=told.get("group", ""),
        consumer=told.get("consumer", ""),
        deliveries=number("deliveries"),
        error=told.get("error", ""),
        error_type=told.get("error_type", ""),
        traceback=told.get("traceback", ""),
        buried_at_ms=number("buried_at_ms"),
    )


REPLAY_PREFIX = b"replay."
OF = b"replay.of"
GROUP = b"replay.group"


def marked(fields: dict[bytes, bytes], original_id: str | None, group: str | None) -> dict[bytes, bytes]:
    """The entry as it is sent round again. One that was replayed before still stands for the first."""
    first = fields.get(OF) or (original_id or "").encode()
    marks = {OF: first} if first else {}
    if group is not None:
        marks[GROUP] = group.encode("utf-8", "surrogateescape")
    return {**unmarked(fields), **marks}


def unmarked(fields: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """The entry as its producer wrote it."""
    if OF not in fields and GROUP not in fields:
        return fields  # as nearly all of them
    return {name: value for name, value in fields.items() if not name.startswith(REPLAY_PREFIX)}


def is_for(fields: dict[bytes, bytes], group: bytes | None) -> bool:
    """Whether a replayed entry concerns this group, or a subscriber without one."""
    return fields.get(GROUP, group) == group
