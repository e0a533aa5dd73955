"""Options that all change sources share, parsed from Spark's string options. Pure.

Names are case-insensitive. An unknown name is an error, so that a typo is noticed.

    tables          names or globs (``shop.*``), separated by commas.
    snapshot        initial (default): the existing rows, then the changes; always: the rows again at every start;
                    never: only changes.
    segments        where the read-ahead log and the chunks of snapshots are kept: a directory of the driver, or a URI
                    of a store (hdfs://, s3a://).
    segmentsShared  true: the tasks read the segments directory themselves, as with a local master; false (default): the
                    driver sends segments to the tasks inside the input partitions.
    gatewayFile     for a URI: a private file from which ``millstream.storage.connect`` reads how to reach the driver's
                    JVM.
    sourceName      the prefix of every event id.
    partitions      1 (default): one Spark partition, in commit order; n: parallel readers, in the order of each key.
    numeric         text (default), double, or decimal(scale).
    onTableChange   stop (default): if a followed table is replaced, or rows enter or leave it without an event, the
                    query ends with an error; snapshot: the query takes a new snapshot of the table.
    exclude         columns to omit from rows, as schema.table.column, separated by commas.
    maxBytes        maximum size of the read-ahead log (default 1073741824).
    maxChangesPerTrigger, maxBytesPerTrigger
                    maximum size of a batch, in whole transactions, at least one.
    chunkRows       approximate number of rows in one chunk of a snapshot (default 100000).
    deadlineMs      how long a run with an end waits for a server that does not answer (default 60000).

Options for the database's address:

    dsn             the address; ``${NAME}`` in it is replaced from the environment of each process that connects.
    dsnFile         a file that contains the dsn, for a dsn with a password.
    passwordFile, passwordEnv
                    the file or the environment variable that contains the password. It is read by the process that
                    connects, so that no secret is in a plan, a checkpoint or a log.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from millstream.cdc.errors import InvalidChangeOption, SourceRefused
from millstream.cdc.json_columns import NUMERIC_AS_TEXT, NumericAs
from millstream.storage import Storage, connect, has_scheme, open_storage
from millstream.storage.location import is_file_uri, local_path

SnapshotMode = Literal["never", "initial", "always"]
OnTableChange = Literal["stop", "snapshot"]
SHARED_OPTIONS = (
    *("dsn", "dsnFile", "passwordFile", "passwordEnv", "tables", "snapshot", "segments", "sourceName", "partitions"),
    *("numeric", "exclude", "maxBytes", "maxChangesPerTrigger", "maxBytesPerTrigger", "chunkRows", "deadlineMs"),
    *("onTableChange", "segmentsShared", "gatewayFile"),
)
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
MAX_PARTITIONS = 64


@dataclass(frozen=True, slots=True)
class FollowOptions:
    """The shared options, for planner and reader."""

    tables: tuple[str, ...]
    segments: str
    source: str
    snapshot: SnapshotMode = "initial"
    partitions: int = 1
    numeric: NumericAs = NUMERIC_AS_TEXT
    exclude: frozenset[str] = frozenset()
    max_bytes: int = 1 << 30
    max_changes: int | None = None
    batch_bytes: int | None = None
    chunk_rows: int = 100_000
    deadline_s: float = 60.0
    on_table_change: OnTableChange = "stop"
    segments_shared: bool = False
    gateway_file: str | None = None

    def storage(self) -> Storage:
        """The place of plans and chunks. Only the driver can open a store; with ``segments_shared`` it is local."""
        return open_storage(self.segments, None if self.gateway_file is None else connect(self.gateway_file))


def known_options(raw: Mapping[str, str], database_options: Sequence[str]) -> dict[str, str]:
    """Options by their canonical names. Raises InvalidChangeOption for a name that is neither shared nor in
    ``database_options``."""
    names = (*SHARED_OPTIONS, *database_options)
    proper_names = {name.lower(): name for name in names}
    values: dict[str, str] = {}
    for name, value in raw.items():
        if name.lower() not in proper_names:
            raise InvalidChangeOption(name, value if "pass" not in name.lower() else "***", ", ".join(names))
        values[proper_names[name.lower()]] = value
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
    on_table_change = values.get("onTableChange", "stop")
    if on_table_change not in ("stop", "snapshot"):
        raise InvalidChangeOption("onTableChange", on_table_change, "stop or snapshot")
    if on_table_change == "snapshot" and snapshot == "never":
        raise InvalidChangeOption("onTableChange", on_table_change, "stop, because snapshot is never")
    exclude = _listed(values.get("exclude", ""))
    if any(column.count(".") != 2 for column in exclude):
        raise InvalidChangeOption("exclude", values["exclude"], "columns as schema.table.column")
    return FollowOptions(
        tables=tuple(_listed(required(values, "tables", "names or globs of tables, such as orders,shop.*"))),
        segments=_location(required(values, "segments", "a directory of the driver, or a URI of a store")),
        segments_shared=boolean(values, "segmentsShared"),
        gateway_file=values.get("gatewayFile"),
        source=values.get("sourceName", default_source),
        snapshot=cast("SnapshotMode", snapshot),
        partitions=positive_integer(values, "partitions", 1, maximum=MAX_PARTITIONS) or 1,
        numeric=numeric,
        exclude=frozenset(exclude),
        max_bytes=positive_integer(values, "maxBytes", 1 << 30) or 1,
        max_changes=positive_integer(values, "maxChangesPerTrigger", None),
        batch_bytes=positive_integer(values, "maxBytesPerTrigger", None),
        chunk_rows=positive_integer(values, "chunkRows", 100_000) or 1,
        on_table_change=cast("OnTableChange", on_table_change),
        deadline_s=(positive_integer(values, "deadlineMs", 60_000) or 1) / 1000,
    )


def _location(text: str) -> str:
    if has_scheme(text):
        return text
    return local_path(text) if is_file_uri(text) else str(Path(text))


def required(values: Mapping[str, str], name: str, allowed: str) -> str:
    value = values.get(name, "").strip()
    if not value:
        raise InvalidChangeOption(name, None, allowed)
    return value


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def missing_table_problems(patterns: Sequence[str], exists: Callable[[str], bool]) -> list[str]:
    """Every name without a wildcard must be the name of a table, and at least one pattern must match a table."""
    missing = [pattern for pattern in patterns if not set("*?[") & set(pattern) and not exists(pattern)]
    if not missing and not any(exists(pattern) for pattern in patterns):
        missing = list(patterns)
    if not missing:
        return []
    hint = "Write schema.table (MariaDB: database.table) in the database's own spelling; * and ? are wildcards."
    return [f"no table is called {', '.join(missing)}. {hint}"]


def boolean(values: Mapping[str, str], name: str) -> bool:
    value = values.get(name, "false").lower()
    if value not in ("true", "false"):
        raise InvalidChangeOption(name, value, "true or false")
    return value == "true"


def positive_integer(values: Mapping[str, str], name: str, default: int | None, maximum: int = 1 << 62) -> int | None:
    if name not in values:
        return default
    text = values[name]
    if not text.isdigit() or not 1 <= int(text) <= maximum:
        raise InvalidChangeOption(name, text, f"a whole number from 1 to {maximum}")
    return int(text)


@dataclass(frozen=True, slots=True, repr=False)
class DatabaseAddress:
    """A database's address and credentials. Pickles unresolved: each process resolves secrets itself."""

    dsn: str | None
    password_file: str | None = None
    password_env: str | None = None
    connect_s: int = 10
    dsn_file: str | None = None
    """A file that contains the whole dsn, for a dsn with a password."""

    def unresolved(self) -> str:
        """The dsn with its variables still in it."""
        return self.dsn if self.dsn is not None else _content("dsnFile", self.dsn_file or "")

    def resolved(self, environment: Mapping[str, str] = os.environ) -> str:
        """The dsn with its variables replaced. Never log it."""

        def value(match: re.Match[str]) -> str:
            setting = environment.get(match[1])
            if not setting:
                raise InvalidChangeOption(
                    "dsn", match[0], f"a variable that is set, {match[1]}, on the driver and on every executor"
                )
            return setting

        return _VARIABLE.sub(value, self.unresolved())

    def password(self, environment: Mapping[str, str] = os.environ) -> str | None:
        """The password from passwordEnv or passwordFile; None if neither is set."""
        if self.password_env is not None:
            setting = environment.get(self.password_env)
            if not setting:
                allowed = "an environment variable that is set, on the driver and on every executor"
                raise InvalidChangeOption("passwordEnv", self.password_env, allowed)
            return setting
        return None if self.password_file is None else _content("passwordFile", self.password_file)


def address(values: Mapping[str, str], example: str) -> DatabaseAddress:
    dsn = None if "dsnFile" in values else required(values, "dsn", example)
    return DatabaseAddress(dsn, values.get("passwordFile"), values.get("passwordEnv"), dsn_file=values.get("dsnFile"))


def _content(option: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, ValueError) as error:
        raise InvalidChangeOption(option, path, f"a file that driver and executors can read ({error})") from None


def excluded_key_problems(table: str, key: Iterable[str], exclude: frozenset[str]) -> list[str]:
    """The key of an event contains the values of the primary key, so an excluded key column would be sent anyway."""
    return [
        f"{table}: exclude names {column}, which is part of its key, and every event has the key. Remove it from "
        "exclude and hide it with a mask processor, or remove the table from tables."
        for column in key
        if f"{table}.{column}" in exclude
    ]


def unmatched_exclude_problems(columns: Mapping[str, Iterable[str]], exclude: frozenset[str]) -> list[str]:
    """``columns`` are all columns of each followed table by its full name. A misspelled column would be sent."""
    existing = {f"{table}.{column}" for table, names in columns.items() for column in names}
    return [
        f"exclude names {column}, and no followed table has such a column. Use the database's spelling and case. If "
        "the column was renamed or dropped, changes that are not read yet may still contain it: correct exclude and "
        "start over with `millstream pipeline reset`."
        for column in sorted(exclude - existing)
    ]


def refuse_missing_excluded(table: str, columns: Iterable[str], exclude: frozenset[str]) -> None:
    """Called before rows of a table are read: a renamed column would be sent under its new name."""
    prefix = f"{table}."
    listed = {column.removeprefix(prefix) for column in exclude if column.startswith(prefix)}
    missing = sorted(listed.difference(columns))
    if missing:
        raise SourceRefused(
            f"exclude names {', '.join(missing)}, and {table} has no such column any more: it was renamed or dropped. "
            "No row of it was sent since. Correct exclude and start over: `millstream pipeline reset`."
        )
