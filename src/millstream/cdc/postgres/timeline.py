"""Detects a server whose log has another history than the one that was read. Pure, except for ``Timeline``.

A log position identifies a change only within one history. A replica that is promoted, or a server that is restored to
an earlier moment, continues the log on a new timeline from the point where it left the old one. What was read behind
that point does not exist there, and the server would silently skip new transactions up to the checkpoint's position.
"""

from __future__ import annotations

from dataclasses import dataclass

from millstream.cdc.errors import PositionLost
from millstream.cdc.postgres.connection import ReplicationConnection
from millstream.cdc.postgres.pgoutput import format_lsn, parse_lsn
from millstream.cdc.segments import read_json, replace_json
from millstream.storage import Storage

TIMELINE_RECORD = "timeline.json"
"""The timeline of the log that was read, next to the segments."""


def end_of_timeline(history: str, timeline: int) -> int | None:
    """Where the server left a timeline, from the content of a timeline history file; None if it never was on it.

    A line is a timeline, the position at which the next one begins, and a comment, separated by white space.
    """
    for line in history.splitlines():
        parts = line.split()
        if len(parts) >= 2 and parts[0] == str(timeline):
            return parse_lsn(parts[1])
    return None


def refuse_other_history(display_address: str, recorded: int, current: int, end: int | None, position: int) -> None:
    """Raises PositionLost unless the log up to ``position``, on timeline ``recorded``, is also that of ``current``.

    ``end``: where the server left ``recorded``; None if it never was on it.
    """
    if end is not None and position <= end:
        return
    left = "it does not descend from" if end is None else f"left at {format_lsn(end)}"
    raise PositionLost(
        f"{display_address} is on timeline {current}, and the checkpoint is at {format_lsn(position)} of timeline "
        f"{recorded}, which the server {left}: it was restored to an earlier moment, or is a replica that was promoted "
        "without the last changes. Rows that were sent since then may not exist any more. Start over with a snapshot: "
        "`millstream pipeline reset`."
    )


@dataclass(frozen=True, slots=True)
class Timeline:
    """The recorded timeline of a checkpoint."""

    storage: Storage
    display_address: str

    def verify(self, connection: ReplicationConnection, current: int, position: int) -> None:
        """Verifies that the log up to ``position`` is on the server's timeline, and records that timeline."""
        recorded = None
        if self.storage.exists(TIMELINE_RECORD):
            recorded = int(read_json(self.storage, TIMELINE_RECORD)["timeline"])
        if recorded == current:
            return
        if recorded is not None:
            history = connection.execute(f"TIMELINE_HISTORY {current}")["content"] if current > 1 else ""
            end = end_of_timeline(history, recorded)
            refuse_other_history(self.display_address, recorded, current, end, position)
        replace_json(self.storage, TIMELINE_RECORD, {"timeline": current})
