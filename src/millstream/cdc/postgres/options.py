"""What a query of ``postgres_changes`` may ask for, read from Spark's text options into values. Pure.

Names are case-insensitive. An unknown name is an error, so that a typo cannot pass.

    dsn             postgresql://user@host:5432/database, or libpq's key=value form; ``${NAME}`` in it is replaced from
                    the environment of each process that connects.
    dsnFile         or a file that holds it, for one with a password in it.
    passwordFile, passwordEnv
                    the file or the environment variable that holds the password, read where it is used: so no secret
                    lies in a plan, in a checkpoint or in a log.
    tables          names or globs (``shop.*``), separated by commas; without a schema: public.
    slot, publication
                    their names; one slot for each query.
    create          true: publication and slot are made where they are absent (default false).
    snapshot        initial (default): the rows that are there, then the changes; always: the rows again at every start;
                    never: changes alone.
    segments        a directory for what was read ahead. Driver and executors must see the same one.
    sourceName      the beginning of every id (default: the slot's name).
    lanes           1 (default): one partition, in the order of commits; n: the order of each key.
    numeric         text (default), double, or decimal(scale).
    unchanged       what stands for a value that Postgres did not send because it did not change; by default it is left
                    out of the row.
    exclude         columns to leave out of rows, as schema.table.column, separated by commas.
    maxBytes        how much may be read ahead (default 1073741824).
    maxChangesPerTrigger, maxBytesPerTrigger
                    how much a batch holds at most, in whole transactions, one at least.
    chunkRows       rows in one chunk of a snapshot (default 100000).
    deadlineMs      how long a run that must come to an end waits for a server that is away (default 60000).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from millstream.cdc.errors import InvalidChangeOption
from millstream.cdc.json_columns import NUMERIC_AS_TEXT, NumericAs
from millstream.cdc.postgres.connection import Login
from millstream.cdc.postgres.preparation import Wanted

SnapshotMode = Literal["never", "initial", "always"]
_NAMES = (
    *(
        "dsn",
        "dsnFile",
        "passwordFile",
        "passwordEnv",
        "tables",
        "slot",
        "publication",
        "create",
        "snapshot",
        "segments",
    ),
    *("sourceName", "lanes", "numeric", "unchanged", "exclude", "maxBytes", "maxChangesPerTrigger"),
    *("maxBytesPerTrigger", "chunkRows", "deadlineMs"),
)
_SLOT_NAME = re.compile(r"[a-z0-9_]{1,63}")
MOST_LANES = 64


@dataclass(frozen=True, slots=True)
class ChangeOptions:
    login: Login
    wanted: Wanted
    segments: str
    source: str
    snapshot: SnapshotMode = "initial"
    lanes: int = 1
    numeric: NumericAs = NUMERIC_AS_TEXT
    unchanged: str | None = None
    exclude: frozenset[str] = frozenset()
    max_bytes: int = 1 << 30
    max_changes: int | None = None
    batch_bytes: int | None = None
    chunk_rows: int = 100_000
    deadline_s: float = 60.0


def change_options(given: Mapping[str, str]) -> ChangeOptions:
    """Raises InvalidChangeOption."""
    known = {name.lower(): name for name in _NAMES}
    values: dict[str, str] = {}
    for name, value in given.items():
        if name.lower() not in known:
            raise InvalidChangeOption(name, value if "pass" not in name.lower() else "***", ", ".join(_NAMES))
        values[known[name.lower()]] = value
    slot = _needed(values, "slot", "a name for the replication slot, such as millstream_orders")
    if not _SLOT_NAME.fullmatch(slot):
        raise InvalidChangeOption("slot", slot, "lower-case letters, digits and underscores, 63 at most")
    if "passwordFile" in values and "passwordEnv" in values:
        raise InvalidChangeOption("passwordFile", values["passwordFile"], "only one of passwordFile and passwordEnv")
    numeric = NumericAs.parse(values.get("numeric", "text"))
    if numeric is None:
        raise InvalidChangeOption("numeric", values["numeric"], "text, double, or decimal(scale) with a scale up to 38")
    snapshot = values.get("snapshot", "initial")
    if snapshot not in ("never", "initial", "always"):
        raise InvalidChangeOption("snapshot", snapshot, "never, initial or always")
    tables = _listed(_needed(values, "tables", "names or globs of tables, such as public.orders,shop.*"))
    exclude = _listed(values.get("exclude", ""))
    if any(column.count(".") != 2 for column in exclude):
        raise InvalidChangeOption("exclude", values["exclude"], "columns as schema.table.column")
    return ChangeOptions(
        login=Login(
            None if "dsnFile" in values else _needed(values, "dsn", "postgresql://user@host:5432/database"),
            values.get("passwordFile"),
            values.get("passwordEnv"),
            dsn_file=values.get("dsnFile"),
        ),
        wanted=Wanted(
            tuple(tables), slot, _needed(values, "publication", "the publication's name"), _truth(values, "create")
        ),
        segments=str(Path(_needed(values, "segments", "a directory that driver and executors share"))),
        source=values.get("sourceName", slot),
        snapshot=cast(SnapshotMode, snapshot),
        lanes=_number(values, "lanes", 1, most=MOST_LANES) or 1,
        numeric=numeric,
        unchanged=values.get("unchanged"),
        exclude=frozenset(exclude),
        max_bytes=_number(values, "maxBytes", 1 << 30) or 1,
        max_changes=_number(values, "maxChangesPerTrigger", None),
        batch_bytes=_number(values, "maxBytesPerTrigger", None),
        chunk_rows=_number(values, "chunkRows", 100_000) or 1,
        deadline_s=(_number(values, "deadlineMs", 60_000) or 1) / 1000,
    )


def _needed(values: Mapping[str, str], name: str, allowed: str) -> str:
    value = values.get(name, "").strip()
    if not value:
        raise InvalidChangeOption(name, None, allowed)
    return value


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _truth(values: Mapping[str, str], name: str) -> bool:
    value = values.get(name, "false").lower()
    if value not in ("true", "false"):
        raise InvalidChangeOption(name, value, "true or false")
    return value == "true"


def _number(values: Mapping[str, str], name: str, default: int | None, most: int = 1 << 62) -> int | None:
    if name not in values:
        return default
    text = values[name]
    if not text.isdigit() or not 1 <= int(text) <= most:
        raise InvalidChangeOption(name, text, f"a whole number from 1 to {most}")
    return int(text)
