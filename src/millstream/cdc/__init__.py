"""Changes of databases as Spark sources: a database's log enters, an Arrow frame of changes leaves.

Nothing here knows Redis; ``pyspark`` is imported by readers and sources alone. A position is acknowledged to the
database when its batch is finished, never before.

What a second database must bring, beside the frame that all share (``segments``, ``spool``, ``offsets``, ``frame``,
``json_columns``, ``lanes``): a session, that is a thread which appends raw messages to the spool, tells it where
transactions end (``commit``) and how far the log is known (``reach``), and acknowledges; a decoder from a segment to
the frame; positions as whole numbers that grow along the log; chunks of a snapshot that are pinned as segments and know
which changes they saw; a reader and a source for Spark.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millstream.cdc.postgres.connection import Login
    from millstream.cdc.postgres.operation import SlotStatus, acknowledge_end, refusal, slot_status
    from millstream.cdc.postgres.preparation import Wanted, drop

POSTGRES_FORMAT = "postgres_changes"

_WHERE = {
    "Login": "connection",
    "SlotStatus": "operation",
    "Wanted": "preparation",
    "acknowledge_end": "operation",
    "drop": "preparation",
    "refusal": "operation",
    "slot_status": "operation",
}


def __getattr__(name: str) -> Any:
    """Imported when asked for: Spark's workers load one small module of this room, and must not wait for the rest."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.postgres.{_WHERE[name]}"), name)


__all__ = ["POSTGRES_FORMAT", "Login", "SlotStatus", "Wanted", "acknowledge_end", "drop", "refusal", "slot_status"]
