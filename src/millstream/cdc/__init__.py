"""Changes of databases as Spark sources: a database's log enters, an Arrow frame of changes leaves.

Nothing here knows Redis; ``pyspark`` is imported by readers and sources alone. A position is acknowledged to the
database when its batch is finished, never before.

``database`` says what a database must bring; ``postgres`` and ``mariadb`` are the two that do. All else is shared: what
sessions read ahead (``spool``, ``segments``), where batches end (``planner``, ``offsets``), chunks of a snapshot
(``snapshot``), the frame (``decoding``, ``json_columns``), Spark's side (``reader``, ``source``).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millstream.cdc.decoding import Decoding as Decoding
    from millstream.cdc.mariadb.connection import MariadbLogin as MariadbLogin
    from millstream.cdc.mariadb.database import BinlogStatus as BinlogStatus
    from millstream.cdc.mariadb.database import Mariadb as Mariadb
    from millstream.cdc.mariadb.database import binlog_refusal as binlog_refusal
    from millstream.cdc.mariadb.database import binlog_status as binlog_status
    from millstream.cdc.mariadb.database import mariadb_options as mariadb_options
    from millstream.cdc.options import DatabaseAddress as DatabaseAddress
    from millstream.cdc.postgres.connection import Login as Login
    from millstream.cdc.postgres.database import Postgres as Postgres
    from millstream.cdc.postgres.database import SlotStatus as SlotStatus
    from millstream.cdc.postgres.database import acknowledge_end as acknowledge_end
    from millstream.cdc.postgres.database import change_options as change_options
    from millstream.cdc.postgres.database import refusal as refusal
    from millstream.cdc.postgres.database import slot_status as slot_status
    from millstream.cdc.postgres.decode import decode_changes as decode_changes
    from millstream.cdc.postgres.pgoutput import Relation as Relation
    from millstream.cdc.postgres.preparation import Wanted as Wanted
    from millstream.cdc.postgres.preparation import drop as drop
    from millstream.cdc.reader import ChangesReader as ChangesReader
    from millstream.cdc.segments import read_segment as read_segment

POSTGRES_FORMAT = "postgres_changes"
MARIADB_FORMAT = "mariadb_changes"

_HOMES = {
    "DatabaseAddress": "options",
    "BinlogStatus": "mariadb.database",
    "ChangesReader": "reader",
    "Decoding": "decoding",
    "Mariadb": "mariadb.database",
    "MariadbLogin": "mariadb.connection",
    "Login": "postgres.connection",
    "Postgres": "postgres.database",
    "Relation": "postgres.pgoutput",
    "SlotStatus": "postgres.database",
    "Wanted": "postgres.preparation",
    "acknowledge_end": "postgres.database",
    "binlog_refusal": "mariadb.database",
    "binlog_status": "mariadb.database",
    "change_options": "postgres.database",
    "decode_changes": "postgres.decode",
    "drop": "postgres.preparation",
    "mariadb_options": "mariadb.database",
    "read_segment": "segments",
    "refusal": "postgres.database",
    "slot_status": "postgres.database",
}
"""Entered when asked for: Spark's workers load one small module of this room, and must not wait for the rest."""

__all__ = ["MARIADB_FORMAT", "POSTGRES_FORMAT", *_HOMES]  # noqa: PLE0604  # the keys are strings, which the rule does not see


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
