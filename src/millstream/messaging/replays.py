"""The marks on an entry that was replayed from the dead letters. They are no part of the message: no codec sees them.

``replay.of`` is the id of the entry that it stands for: to whoever remembers entries, it is that one. ``replay.group``
is the one group of this stream that it is meant for; groups that handled it the first time pass it over. In another
stream nobody has handled it, and a mark would keep everybody away. Pure.
"""

from __future__ import annotations

PREFIX = b"replay."
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
    return {name: value for name, value in fields.items() if not name.startswith(PREFIX)}


def is_for(fields: dict[bytes, bytes], group: bytes | None) -> bool:
    """Whether a replayed entry concerns this group, or a subscriber without one."""
    return fields.get(GROUP, group) == group
