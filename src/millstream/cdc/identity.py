"""Compares table identities: whether a followed table is still the table whose rows are in the stream. Pure.

A name does not identify a table: a table that was dropped and created again, or swapped by renaming, has the same name
and different rows. An identity is JSON, so that it can be stored with a snapshot's plan:

    schema      the schema's name
    table       the table's name
    oid         the table's number in the catalog; None in MariaDB, whose log has the statements that replace a table
    published   its entry in the publication; None if it is not published
    options     the version of the publication's options, which changes whenever they are altered
    partitions  names of its partitions by their numbers
    attached    the transaction that attached each partition
    keys        the primary keys that it is recorded to have had, the newest last
    empty       numbers of the partitions that were created as partitions, and so were attached without rows
    left        why the table is no longer followed; absent if it is followed
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

_PART = r'("(?:[^"]|"")*"|[^".]*)'
_FULL_NAME = re.compile(rf"{_PART}\.{_PART}", re.DOTALL)


def full_name(schema: str, table: str) -> str:
    """An unambiguous name: a part with a dot or a quote is quoted, so that ``"a.b".c`` differs from ``a."b.c"``."""
    return f"{_quoted(schema)}.{_quoted(table)}"


def split_full_name(name: str) -> tuple[str, str]:
    """The schema and the table in a full name."""
    match = _FULL_NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is not the full name of a table")
    return _unquoted(match[1]), _unquoted(match[2])


def _quoted(part: str) -> str:
    return '"' + part.replace('"', '""') + '"' if {".", '"'} & set(part) else part


def _unquoted(part: str) -> str:
    return part[1:-1].replace('""', '"') if part.startswith('"') else part


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Describes how a table has changed, as part of an error message. None if the log has every change since
    ``before``."""
    if "left" in now:
        return str(now["left"])
    if before["oid"] != now["oid"]:
        return "a different table has its name now; it was dropped and created again, or swapped by renaming"
    if now["published"] is None:
        return "it was removed from the publication"
    if before["published"] != now["published"]:
        return "it was removed from the publication and added again"
    if before["options"] != now["options"]:
        return "the options of its publication were altered, so changes may have been excluded for a time"
    if before["keys"][-1] != now["keys"][-1]:
        return key_change(now["keys"][-1], before["keys"][-1])
    gone = [name for oid, name in before["partitions"].items() if oid not in now["partitions"]]
    if gone:
        return f"partition {', '.join(sorted(gone))} was detached or dropped"
    common = before["partitions"].keys() & now["partitions"].keys()
    reattached = [now["partitions"][oid] for oid in common if before["attached"][oid] != now["attached"][oid]]
    if reattached:
        return f"partition {', '.join(sorted(reattached))} was detached and attached again"
    harmless = {*before["partitions"], *now["empty"]}
    attached = [name for oid, name in now["partitions"].items() if oid not in harmless]
    return f"partition {', '.join(sorted(attached))} was attached" if attached else None


def key_change(now: Collection[str], before: Collection[str]) -> str:
    """Describes a change of the primary key, as part of an error message."""
    new = f"is ({', '.join(now)}) now" if now else "is gone"
    return f"its key {new}, and was ({', '.join(before)})"


def with_earlier_keys(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    earlier = [key for key in before.get("keys", []) if key not in now["keys"]]
    return {**now, "keys": [*earlier, *now["keys"]]}


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Compares the tables that are in both arguments: the reason for each that has changed. A dropped table that
    matches only a glob stays in ``before``, so that a new table of the same name counts as a change."""
    reasons = {name: difference(before[name], now[name]) for name in before.keys() & now.keys()}
    return {name: why for name, why in reasons.items() if why is not None}
