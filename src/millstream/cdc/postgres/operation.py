"""What people and pipelines ask about a slot, and tell it, from outside of the query that reads it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import psycopg

from millstream.cdc.errors import SourceRefused, SourceUnreachable
from millstream.cdc.offsets import ChangeOffset
from millstream.cdc.postgres import catalog
from millstream.cdc.postgres.connection import Login
from millstream.cdc.postgres.pgoutput import format_lsn
from millstream.cdc.postgres.preparation import Wanted, look

_FREE_S = 15.0


@dataclass(frozen=True, slots=True)
class SlotStatus:
    """How a slot stands. ``held_bytes`` of log are kept for it; ``wal_status`` is reserved, extended, unreserved (about
    to be lost) or lost."""

    slot: str
    active: bool
    confirmed: int
    held_bytes: int
    wal_status: str


def slot_status(login: Login, slot: str) -> SlotStatus | None:
    """None where there is no such slot. Raises SourceUnreachable and SourceRefused."""
    with login.connect() as connection:
        found = catalog.slot_of(connection, slot)
    if found is None:
        return None
    return SlotStatus(slot, found.active, found.confirmed or 0, found.held_bytes or 0, found.wal_status or "unknown")


def refusal(login: Login, wanted: Wanted, *, begun: bool) -> str | None:
    """Why the database cannot be followed as it is; None where it can, or may yet because it does not answer now."""
    try:
        look(login, wanted, begun=begun)
    except SourceRefused as error:
        return str(error)
    except SourceUnreachable:
        return None
    return None


def acknowledge_end(login: Login, slot: str, logged: dict[str, Any]) -> None:
    """Tells the slot where the last committed batch ended, once its reader is gone: a run that has come to its end
    plans no further batch, and so never says so itself. Raises SourceUnreachable and SourceRefused."""
    end, until = ChangeOffset.from_json(logged), time.monotonic() + _FREE_S
    with login.connect() as connection:
        while True:
            found = catalog.slot_of(connection, slot)
            if found is None or found.confirmed is None or found.confirmed >= end.position:
                return
            try:
                connection.execute("SELECT pg_replication_slot_advance(%s, %s)", (slot, format_lsn(end.position)))
                return
            except psycopg.errors.ObjectInUse:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)
