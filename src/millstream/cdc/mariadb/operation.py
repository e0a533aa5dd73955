"""What people and pipelines ask about a server's log, from outside of the query that reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from millstream.cdc.errors import PositionLost, SourceRefused, SourceUnreachable
from millstream.cdc.mariadb import catalog
from millstream.cdc.mariadb.binlog import file_number
from millstream.cdc.mariadb.connection import MariadbLogin, ask
from millstream.cdc.mariadb.preparation import look
from millstream.cdc.offsets import ChangeOffset


@dataclass(frozen=True, slots=True)
class BinlogStatus:
    """How the log stands beside a checkpoint. ``lost``: why what follows the checkpoint cannot be had; None: it can.
    ``behind_bytes`` of log lie behind it, None where there is no checkpoint yet. ``keeps_s``: how long the server keeps
    its files, 0: until somebody purges them. ``spare_files``: how many older files it still has."""

    files: int
    held_bytes: int
    keeps_s: int
    behind_bytes: int | None = None
    spare_files: int = 0
    lost: str | None = None


def binlog_status(login: MariadbLogin, logged: dict[str, Any] | None) -> BinlogStatus:
    """``logged``: where the last committed batch ended. Raises SourceUnreachable and SourceRefused."""
    with login.connect() as connection:
        files = catalog.log_files(connection)
        [(keeps_s,)] = ask(connection, "SELECT CAST(@@GLOBAL.binlog_expire_logs_seconds AS UNSIGNED)")
        held = sum(each.size for each in files)
        if logged is None:
            return BinlogStatus(len(files), held, int(keeps_s))
        end = ChangeOffset.from_json(logged)
        number, place = end.position >> 32, end.position & 0xFFFFFFFF
        behind = sum(each.size for each in files if file_number(each.name) > number)
        behind += sum(max(0, each.size - place) for each in files if file_number(each.name) == number)
        spare = sum(1 for each in files if file_number(each.name) < number)
        try:
            catalog.check_position(connection, login, end.server, end.position, end.mark)
        except PositionLost as error:
            return BinlogStatus(len(files), held, int(keeps_s), behind, spare, str(error))
        return BinlogStatus(len(files), held, int(keeps_s), behind, spare)


def binlog_refusal(login: MariadbLogin, tables: Sequence[str]) -> str | None:
    """Why the server cannot be followed as it is; None where it can, or may yet because it does not answer now."""
    try:
        look(login, tables)
    except SourceRefused as error:
        return str(error)
    except SourceUnreachable:
        return None
    return None
