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
    from millstream.cdc.postgres.connection import Login as Login
    from millstream.cdc.postgres.decode import Decoding as Decoding
    from millstream.cdc.postgres.decode import decode_changes as decode_changes
    from millstream.cdc.postgres.operation import SlotStatus as SlotStatus
    from millstream.cdc.postgres.operation import acknowledge_end as acknowledge_end
    from millstream.cdc.postgres.operation import refusal as refusal
    from millstream.cdc.postgres.operation import slot_status as slot_status
    from millstream.cdc.postgres.options import change_options as change_options
    from millstream.cdc.postgres.pgoutput import Relation as Relation
    from millstream.cdc.postgres.preparation import Wanted as Wanted
    from millstream.cdc.postgres.preparation import drop as drop
    from millstream.cdc.postgres.reader import PostgresChangesReader as PostgresChangesReader
    from millstream.cdc.segments import read_segment as read_segment

POSTGRES_FORMAT = "postgres_changes"

_HOMES = {
    "Decoding": "postgres.decode",
    "Login": "postgres.connection",
    "PostgresChangesReader": "postgres.reader",
    "Relation": "postgres.pgoutput",
    "SlotStatus": "postgres.operation",
    "Wanted": "postgres.preparation",
    "acknowledge_end": "postgres.operation",
    "change_options": "postgres.options",
    "decode_changes": "postgres.decode",
    "drop": "postgres.preparation",
    "read_segment": "segments",
    "refusal": "postgres.operation",
    "slot_status": "postgres.operation",
}
"""Entered when asked for: Spark's workers load one small module of this room, and must not wait for the rest."""

__all__ = ["POSTGRES_FORMAT", *_HOMES]  # noqa: PLE0604  # the keys are strings, which the rule does not see


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
