"""Structured values in entries, for those who ask for them: each field's value as JSON, so that types come back.

``await broker.xadd("orders", to_json_fields({"id": 7, "paid": True, "lines": [...]}))`` and ``entry.values()``. Plain
tools show the values as they are; the broker and its links carry bytes, as ever.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from millstream.errors import InvalidArgument


def to_json_fields(values: Mapping[str, Any]) -> dict[str, bytes]:
    """Each value as JSON: None, bool, int, float, str, and lists and dicts of them; a Decimal keeps its digits.

    Raises InvalidArgument, which names the field, for what JSON does not have: NaN, infinities, bytes, sets.
    """
    fields = {}
    for name, value in values.items():
        try:
            text = _written(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidArgument(f"values[{name!r}]", value, f"what JSON can carry ({error})") from error
        fields[name] = text.encode("utf-8", "surrogatepass")
    return fields


def from_json_fields(fields: Mapping[bytes, bytes]) -> dict[str, Any]:
    """The values of an entry that was written so. Integers are exact, however long; other numbers are floats.

    A field that is no JSON (a plain producer's) comes as its text, or as bytes where it is none.
    """
    return {name.decode("utf-8", "surrogateescape"): _read(value) for name, value in fields.items()}


def _written(value: Any) -> str:
    if isinstance(value, Decimal):
        if not value.is_finite():
            raise ValueError(f"{value} is no number of JSON")
        return str(value)
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _read(raw: bytes) -> Any:
    try:
        text = raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return raw
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
