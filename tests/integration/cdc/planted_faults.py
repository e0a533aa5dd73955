"""Faults that this source is built to avoid, to be planted: the ledger must detect them.

Each function takes the function that plants the fault: ``monkeypatch.setattr``, or ``setattr`` in another process
(``as_code``).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from millstream.cdc.mariadb import catalog as mariadb_catalog
from millstream.cdc.mariadb.binlog import position_of
from millstream.cdc.offsets import ChangeOffset
from millstream.cdc.planner import Planner
from millstream.cdc.postgres import catalog as postgres_catalog
from millstream.cdc.postgres.database import Postgres, slot_status
from millstream.cdc.postgres.pgoutput import BEGIN, parse_begin
from millstream.cdc.segments import Numbers, read_segment
from millstream.cdc.snapshot import SeenTable
from millstream.testing import wait_until

Plant = Callable[[Any, str, Any], None]
ACKNOWLEDGED = "acknowledged"


def as_code(fault: Callable[..., None], *arguments: str) -> str:
    """For the start of another Python process."""
    listed = ", ".join(["setattr", *map(repr, arguments)])
    return f"import planted_faults\nplanted_faults.{fault.__name__}({listed})\n"


def cut_by_lsn(plant: Plant, segments: str) -> None:
    """PostgreSQL: a chunk is assumed to have seen everything that was in the log when it was read."""

    def before_the_chunk(table: SeenTable, xids: Numbers) -> Any:
        positions: dict[int, int] = {}
        for path in Path(segments).glob("0*.seg"):
            segment = read_segment(path)
            for start, end in zip(segment.starts.tolist(), segment.ends.tolist(), strict=True):
                if segment.body[start] == BEGIN:
                    begin = parse_begin(bytes(segment.body[start:end]))
                    positions[begin.xid] = begin.lsn
        return np.array([[positions[xid] < table.settled for xid in xids.tolist()]] * len(table.snapshots))

    plant(SeenTable, "visibility", before_the_chunk)


def cut_by_master_status(plant: Plant, meanwhile: Callable[[], Any] = lambda: time.sleep(0.3)) -> None:
    """MariaDB: a chunk's position is the end of the log, read outside the chunk's transaction.

    ``meanwhile`` happens between the two questions."""

    def log_end_position(connection: Any) -> int:
        mariadb_catalog.fetch_rows(connection, "START TRANSACTION WITH CONSISTENT SNAPSHOT")
        meanwhile()
        [(file, offset, *_)] = mariadb_catalog.fetch_rows(connection, "SHOW MASTER STATUS")
        return position_of(file, int(offset))

    plant(mariadb_catalog, "exact_position", log_end_position)


def acknowledged_early(plant: Plant) -> None:
    """A batch counts as finished when it is planned. MariaDB keeps no position for a reader: it is recorded here."""
    original, opened = Planner.next_offset, Planner._open

    def acknowledge_planned(self: Planner, finished: ChangeOffset, max_changes: int | None) -> ChangeOffset | None:
        end = original(self, finished, max_changes)
        if end is not None and self._session is not None and end.position > finished.position:
            self._session.acknowledge(end.position)
            if isinstance(self._database, Postgres):
                # The server is queried, because a position that was sent but not yet read is lost if the process is
                # killed.
                options = self._database.parsed_options
                wait_until(lambda: slot_status(options.login, options.config.slot).confirmed >= end.position)
            (self._directory / ACKNOWLEDGED).write_text(f"{end.position}")
        return end

    def resume_acknowledged(self: Planner, start: ChangeOffset) -> Any:
        record = self._directory / ACKNOWLEDGED
        if self._session is None and record.exists() and start.server.startswith("server "):
            start = start.moved(position=max(start.position, int(record.read_text())))
        return opened(self, start)

    plant(Planner, "next_offset", acknowledge_planned)
    plant(Planner, "_open", resume_acknowledged)


def gap_not_checked(plant: Plant) -> None:
    """The source does not check whether the server still has the log after the checkpoint."""
    plant(postgres_catalog, "refuse_gap", lambda slot, state, position: None)
    original = mariadb_catalog.check_position
    plant(
        mariadb_catalog,
        "check_position",
        lambda c, login, server, position, gtids: original(c, login, server, position, None),
    )


def killed_after_planning(plant: Plant) -> None:
    """The whole pipeline, once, as soon as it has planned a batch of changes that no chunk of a snapshot can have seen:
    changes before it would be dropped anyway, and not be missed."""
    original = Planner.next_offset

    def kill_once(self: Planner, finished: ChangeOffset, max_changes: int | None) -> ChangeOffset | None:
        end = original(self, finished, max_changes)
        died = self._directory / "died"
        if end is None or end.position == finished.position or died.exists():
            return end  # what a snapshot saw is unknown while it is still being read
        if finished.position > max((table.settled for table in self._seen_by(finished)), default=0):
            died.touch()
            os.killpg(os.getsid(0), signal.SIGKILL)
        return end

    plant(Planner, "next_offset", kill_once)
