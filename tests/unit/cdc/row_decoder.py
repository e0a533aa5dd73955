"""A simple decoder with a loop over messages and columns, as a reference for the numpy decoder."""

from __future__ import annotations

import json
import struct
from typing import Any

from millstream.cdc.postgres.pgoutput import Relation


def _tuple(message: bytes, at: int) -> tuple[list[str | bytes | None], int]:
    [count] = struct.unpack_from(">H", message, at)
    at += 2
    values: list[str | bytes | None] = []
    for _ in range(count):
        kind = message[at : at + 1]
        at += 1
        if kind == b"t":
            [size] = struct.unpack_from(">I", message, at)
            values.append(message[at + 4 : at + 4 + size].decode())
            at += 4 + size
        else:
            values.append(None if kind == b"n" else kind)
    return values, at


def _shown(relation: Relation, values: list[Any], *, key_only: bool = False) -> str:
    members = {}
    for column, value in zip(relation.columns, values, strict=True):
        if value == b"u" or (key_only and not column.key):
            continue
        if value is None:
            members[column.name] = "null"
        elif column.kind == "boolean":
            members[column.name] = "true" if value == "t" else "false"
        elif column.kind == "number" or (column.kind == "float" and value not in ("NaN", "Infinity", "-Infinity")):
            members[column.name] = value
        else:
            members[column.name] = json.dumps(value, ensure_ascii=False)
    return "{" + ",".join(f"{json.dumps(n, ensure_ascii=False)}:{v}" for n, v in members.items()) + "}"


def decode_plainly(messages: list[bytes], relations: dict[int, Relation], source: str) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    lsn = ts_ms = xid = number = 0
    for message in messages:
        kind = message[:1]
        if kind == b"B":
            _, lsn, when, xid = struct.unpack(">cQqI", message)
            ts_ms, number = 946_684_800_000 + when // 1000, 0
            continue
        if kind == b"C":
            continue

        def tell(relation: Relation, op: str, key: str | None, before: Any, after: Any, sub_event: int = 0) -> None:
            events.append(
                {
                    "id": f"{source}:{lsn}:{number}" + (f".{sub_event}" if sub_event else ""),  # noqa: B023
                    "key": key,
                    "db": "db",
                    "schema": relation.schema,
                    "table": relation.table,
                    "op": op,
                    "before": before,
                    "after": after,
                    "ts_ms": ts_ms,  # noqa: B023
                    "position": {"lsn": lsn, "transaction": str(xid), "order": number},  # noqa: B023
                }
            )

        if kind == b"T":
            [count] = struct.unpack_from(">I", message, 1)
            for sub_event, table in enumerate(struct.unpack_from(f">{count}I", message, 6)):
                if table in relations:
                    tell(relations[table], "t", None, None, None, sub_event)
            number += 1
            continue
        [table] = struct.unpack_from(">I", message, 1)
        relation = relations[table]
        mark, old, at = message[5:6], None, 6
        if mark in (b"K", b"O"):
            old, at = _tuple(message, 6)
            at += 1
        new = None if kind == b"D" else _tuple(message, at)[0]
        key_at = relation.key
        if new is not None and old is not None:
            new = [
                o if n == b"u" and (mark == b"O" or at in key_at) else n
                for at, (n, o) in enumerate(zip(new, old, strict=True))
            ]
        own = {b"K": lambda: _shown(relation, old, key_only=True), b"O": lambda: _shown(relation, old)}  # noqa: B023

        def key(values: list[Any]) -> str:
            return _shown(relation, values, key_only=True)  # noqa: B023

        if kind == b"I":
            tell(relation, "c", key(new), None, _shown(relation, new))
        elif kind == b"D":
            tell(relation, "d", key(old), own[mark](), None)
        elif old is not None and any(new[i] != old[i] and new[i] not in (None, b"u") for i in key_at):
            tell(relation, "d", key(old), own[mark](), None)
            tell(relation, "c", key(new), None, _shown(relation, new), 1)
        else:
            tell(relation, "u", key(new), own[mark]() if mark == b"O" else None, _shown(relation, new))
        number += 1
    return events
