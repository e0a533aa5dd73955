"""What every change source may be asked for, read from Spark's text options into values. Pure.

Names are case-insensitive. An unknown name is an error, so that a typo cannot pass.

    tables          names or globs (``shop.*``), separated by commas.
    snapshot        initial (default): the rows that are there, then the changes; always: the rows again at every start;
                    never: changes alone.
    segments        a directory for what was read ahead. Driver and executors must see the same one.
    sourceName      the beginning of every id.
    lanes           1 (default): one partition, in the order of commits; n: the order of each key.
    numeric         text (default), double, or decimal(scale).
    exclude         columns to leave out of rows, as schema.table.column, separated by commas.
    maxBytes        how much may be read ahead (default 1073741824).
    maxChangesPerTrigger, maxBytesPerTrigger
                    how much a batch holds at most, in whole transactions, one at least.
    chunkRows       rows in one chunk of a snapshot, about (default 100000).
    deadlineMs      how long a run that must come to an end waits for a server that is away (default 60000).

and where the database is:

    dsn             its address; ``${NAME}`` in it is replaced from the environment of each process that connects.
    dsnFile         or a file that holds it, for one with a password in it.
    passwordFile, passwordEnv
                    the file or the environment variable that holds the password, read where it is used: so no secret
                    lies in a plan, in a checkpoint or in a log.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from millstream.cdc.errors import InvalidChangeOption
from millstream.cdc.json_columns import NUMERIC_AS_TEXT, NumericAs

SnapshotMode = Literal["never", "initial", "always"]
_SHARED = (
    *("dsn", "dsnFile", "passwordFile", "passwordEnv", "tables", "snapshot", "segments", "sourceName", "lanes"),
    *("numeric", "exclude", "maxBytes", "maxChangesPerTrigger", "maxBytesPerTrigger", "chunkRows", "deadlineMs"),
)
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
MOST_LANES = 64


@dataclass(frozen=True, slots=True)
class FollowOptions:
    """What planner and reader go by, whatever the database."""

    tables: tuple[str, ...]
    segments: str
    source: str
    snapshot: SnapshotMode = "initial"
    lanes: int = 1
    numeric: NumericAs = NUMERIC_AS_TEXT
    exclude: frozenset[str] = frozenset()
    max_bytes: int = 1 << 30
    max_changes: int | None = None
    batch_bytes: int | None = None
    chunk_rows: int = 100_000
    deadline_s: float = 60.0


def known_options(given: Mapping[str, str], own: Sequence[str]) -> dict[str, str]:
    """By their proper names. Raises InvalidChangeOption for one that is neither shared nor the database's ``own``."""
    names = (*_SHARED, *own)
    known = {name.lower(): name for name in names}
    values: dict[str, str] = {}
    for name, value in given.items():
        if name.lower() not in known:
            raise InvalidChangeOption(name, value if "pass" not in name.lower() else "***", ", ".join(names))
        values[known[name.lower()]] = value
    if "passwordFile" in values and "passwordEnv" in values:
        raise InvalidChangeOption("passwordFile", values["passwordFile"], "only one of passwordFile and passwordEnv")
    return values


def read_options(values: Mapping[str, str], default_source: str) -> FollowOptions:
    numeric = NumericAs.parse(values.get("numeric", "text"))
    if numeric is None:
        raise InvalidChangeOption("numeric", values["numeric"], "text, double, or decimal(scale) with a scale up to 38")
    snapshot = values.get("snapshot", "initial")
    if snapshot not in ("never", "initial", "always"):
        raise InvalidChangeOption("snapshot", snapshot, "never, initial or always")
    exclude = _listed(values.get("exclude", ""))
    if any(column.count(".") != 2 for column in exclude):
        raise InvalidChangeOption("exclude", values["exclude"], "columns as schema.table.column")
    return FollowOptions(
        tables=tuple(_listed(needed(values, "tables", "names or globs of tables, such as orders,shop.*"))),
        segments=str(Path(needed(values, "segments", "a directory that driver and executors share"))),
        source=values.get("sourceName", default_source),
        snapshot=cast("SnapshotMode", snapshot),
        lanes=number(values, "lanes", 1, most=MOST_LANES) or 1,
        numeric=numeric,
        exclude=frozenset(exclude),
        max_bytes=number(values, "maxBytes", 1 << 30) or 1,
        max_changes=number(values, "maxChangesPerTrigger", None),
        batch_bytes=number(values, "maxBytesPerTrigger", None),
        chunk_rows=number(values, "chunkRows", 100_000) or 1,
        deadline_s=(number(values, "deadlineMs", 60_000) or 1) / 1000,
    )


def needed(values: Mapping[str, str], name: str, allowed: str) -> str:
    value = values.get(name, "").strip()
    if not value:
        raise InvalidChangeOption(name, None, allowed)
    return value


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def truth(values: Mapping[str, str], name: str) -> bool:
    value = values.get(name, "false").lower()
    if value not in ("true", "false"):
        raise InvalidChangeOption(name, value, "true or false")
    return value == "true"


def number(values: Mapping[str, str], name: str, default: int | None, most: int = 1 << 62) -> int | None:
    if name not in values:
        return default
    text = values[name]
    if not text.isdigit() or not 1 <= int(text) <= most:
        raise InvalidChangeOption(name, text, f"a whole number from 1 to {most}")
    return int(text)


@dataclass(frozen=True, slots=True, repr=False)
class DatabaseAddress:
    """Where a database is and who connects. Pickles as it was written: secrets are looked up by each process."""

    dsn: str | None
    password_file: str | None = None
    password_env: str | None = None
    connect_s: int = 10
    dsn_file: str | None = None
    """Holds the whole dsn, where a password is in it."""

    def written(self) -> str:
        """The dsn as it was given."""
        return self.dsn if self.dsn is not None else _content("dsnFile", self.dsn_file or "")

    def whole(self, environment: Mapping[str, str] = os.environ) -> str:
        """The dsn with its variables replaced. Never log it."""

        def value(match: re.Match[str]) -> str:
            found = environment.get(match[1])
            if not found:
                raise InvalidChangeOption(
                    "dsn", match[0], f"a variable that is set, {match[1]}, on the driver and on every executor"
                )
            return found

        return _VARIABLE.sub(value, self.written())

    def password(self, environment: Mapping[str, str] = os.environ) -> str | None:
        """Where it is not in the dsn."""
        if self.password_env is not None:
            found = environment.get(self.password_env)
            if not found:
                allowed = "an environment variable that is set, on the driver and on every executor"
                raise InvalidChangeOption("passwordEnv", self.password_env, allowed)
            return found
        return None if self.password_file is None else _content("passwordFile", self.password_file)


def address(values: Mapping[str, str], example: str) -> DatabaseAddress:
    dsn = None if "dsnFile" in values else needed(values, "dsn", example)
    return DatabaseAddress(dsn, values.get("passwordFile"), values.get("passwordEnv"), dsn_file=values.get("dsnFile"))


def _content(option: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, ValueError) as error:
        raise InvalidChangeOption(option, path, f"a file that driver and executors can read ({error})") from None
