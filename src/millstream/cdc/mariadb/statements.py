"""What a statement in the log means for the rows of followed tables. Pure.

In row format changes of rows come as events. Statements are there for all else; some of them take rows away without an
event, and a session may have written in statement format.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

Followed = Callable[[str, str], bool]

_COMMENT = re.compile(r"/\*(?![!M]).*?\*/|(?:--[ \t\n]|#)[^\n]*(?:\n|$)", re.DOTALL)
_NAME = r"(?:`(?:[^`]|``)+`|[^\s`.,;()'\"]+)"
_TABLE = rf"{_NAME}(?:\s*\.\s*{_NAME})?"
_TRUNCATE = re.compile(rf"truncate\s+(?:table\s+)?({_TABLE})\s*(?:wait\s+\d+|nowait)?\s*;?", re.I)
_DROP = re.compile(
    rf"drop\s+tables?\s+(?:if\s+exists\s+)?({_TABLE}(?:\s*,\s*{_TABLE})*)"
    r"\s*(?:wait\s+\d+|nowait)?\s*(?:restrict|cascade)?\s*;?",
    re.I,
)
_REPLACED = re.compile(rf"create\s+or\s+replace\s+table\s+({_TABLE})", re.I)
_DROP_DATABASE = re.compile(rf"drop\s+(?:database|schema)\s+(?:if\s+exists\s+)?({_NAME})", re.I)
_PARTITION = re.compile(
    rf"alter\s+(?:online\s+)?(?:ignore\s+)?table\s+(?:if\s+exists\s+)?({_TABLE})\s.*?"
    r"\b(?:truncate|drop|exchange|convert)\s+(?:partition|table)\b",
    re.I | re.DOTALL,
)
_CHANGES = frozenset(("insert", "update", "delete", "replace", "load", "with", "call", "do", "execute", "select"))


@dataclass(frozen=True, slots=True)
class Meaning:
    """``emptied``: these tables, as (database, table), have no rows any more. ``refused``: why it is not followed."""

    kind: Literal["nothing", "commit", "rollback", "rollback to", "emptied", "refused"]
    emptied: tuple[tuple[str, str], ...] = ()
    refused: str = ""


_NOTHING = Meaning("nothing")


def meaning(statement: str, database: str, followed: Followed, tables: Collection[str]) -> Meaning:
    """``database`` was in use; ``tables`` are the full names of those that are known to be followed."""
    text = _COMMENT.sub(" ", statement).strip()
    text = re.sub(r"^/\*[!M]+\d*\s*", "", text)
    words = text[:80].lower().split()
    first = words[0].rstrip(";") if words else ""
    if first == "commit":
        return Meaning("commit")
    if first == "rollback":
        return Meaning("rollback to" if len(words) > 1 and "to" in words[1:3] else "rollback")
    if first in _CHANGES:
        return _refused(
            statement, "was logged as a statement, not as rows. Set `binlog_format = ROW` for every session"
        )
    if first == "truncate":
        match = _TRUNCATE.fullmatch(text)
        if match is None:
            return _refused(statement, "empties a table in words that are not understood")
        return _emptied([_parsed(match[1], database)], followed)
    if first == "drop" and len(words) > 1 and words[1] in ("table", "tables"):
        match = _DROP.fullmatch(text)
        if match is None:
            return _refused(statement, "drops tables in words that are not understood")
        return _emptied([_parsed(name, database) for name in re.findall(_TABLE, match[1])], followed)
    if match := _REPLACED.match(text):
        return _emptied([_parsed(match[1], database)], followed)
    if match := _DROP_DATABASE.match(text):
        gone = _plain(match[1])
        names = [name.split(".", 1) for name in sorted(tables)]
        return _emptied([(schema, table) for schema, table in names if schema == gone], followed)
    if (match := _PARTITION.match(text)) and followed(*_parsed(match[1], database)):
        return _refused(statement, "takes rows away or brings rows in without telling which")
    return _NOTHING


def _emptied(tables: list[tuple[str, str]], followed: Followed) -> Meaning:
    mine = tuple(table for table in tables if followed(*table))
    return Meaning("emptied", mine) if mine else _NOTHING


def _refused(statement: str, why: str) -> Meaning:
    short = " ".join(statement.split()[:3])[:60]  # no more: values may follow
    return Meaning("refused", refused=f"the statement {short!r} ... {why}")


def _parsed(name: str, database: str) -> tuple[str, str]:
    parts = re.findall(_NAME, name)
    return (_plain(parts[0]), _plain(parts[1])) if len(parts) == 2 else (database, _plain(parts[0]))


def _plain(name: str) -> str:
    return name[1:-1].replace("``", "`") if name.startswith("`") else name
