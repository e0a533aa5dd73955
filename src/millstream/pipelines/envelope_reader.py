"""Input documents as events: native, Debezium, CloudEvents, or any JSON object as a row.

``understand`` decides for one document, in Python: what is taken out of it is the very text that stands there, and what
is not one whole JSON object is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from millstream.pipelines.envelopes import HAPPENED
from millstream.pipelines.events import LAST_MS, OPS, event_frame, per_row
from millstream.pipelines.json_text import NO_OBJECT, JsonError, JsonMember, Number, is_object, members, shown

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

Format = Literal["auto", "native", "debezium", "cloudevents", "row"]
_OPS_BY_WORD = {word: op for op, word in HAPPENED.items()}
_ORIGIN = ("name", "db", "schema", "table")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class SourcePosition:
    """What the source knows of a document, whatever is in it: where it stands, when it came, what to call it."""

    id: Column
    ts_ms: Column
    name: Column
    table: Column
    key: Column | None = None


class Understood(NamedTuple):
    """What a document says of its event; what it does not say is None. ``error``: why it is no event."""

    op: str | None = None
    before: str | None = None
    after: str | None = None
    ts_ms: int | None = None
    name: str | None = None
    db: str | None = None
    schema: str | None = None
    table: str | None = None
    id: str | None = None
    subject: str | None = None
    error: str | None = None


_STRUCT = ", ".join(f"`{name}` {'bigint' if name == 'ts_ms' else 'string'}" for name in Understood._fields)


class _NoEventError(ValueError):
    """Why the document is no event."""


def read_documents(
    frame: DataFrame, text: Column, at: SourcePosition, form: Format, *, own_ids: bool = False
) -> DataFrame:
    """``frame`` as events. What cannot be understood keeps its text as ``payload`` and says why.

    ``own_ids`` takes the id that native events and CloudEvents carry, where there is one; otherwise, and by default,
    the position is the id: it is unique whatever the producers do.
    """
    from pyspark.sql import functions as F

    def read(document: str | None) -> Understood:
        return understand(document, form)

    # Columns of the input that the position is made of are kept beside the document.
    shaped = frame.withColumns(
        {
            "_id": at.id.cast("string"),
            "_ts": at.ts_ms.cast("bigint"),
            "_name": at.name.cast("string"),
            "_table": at.table.cast("string"),
            "_key": (F.lit(None) if at.key is None else at.key).cast("string"),
            "_text": text.cast("string"),
        }
    ).withColumn("_d", per_row(read, _STRUCT, F.col("_text")))
    fine = F.col("_d.error").isNull()
    columns = {
        "id": F.coalesce(F.col("_d.id"), F.col("_id")) if own_ids else F.col("_id"),
        "key": F.coalesce(F.col("_key"), F.col("_d.subject")),
        "name": F.coalesce(F.col("_d.name"), F.col("_name")),
        "db": F.col("_d.db"),
        "schema": F.col("_d.schema"),
        "table": F.coalesce(F.col("_d.table"), F.col("_table")),
        "op": F.col("_d.op"),
        "before": F.col("_d.before"),
        "after": F.col("_d.after"),
        "ts_ms": F.coalesce(F.col("_d.ts_ms"), F.col("_ts")),
        "payload": F.when(~fine, F.col("_text")),
        "error": F.col("_d.error"),
        "stage": F.when(~fine, F.lit("source")),
    }
    return event_frame(shaped, columns, plain=("op",))  # one of OPS, or null


def understand(text: str | None, form: Format) -> Understood:
    """One document as an event of ``form``; ``auto`` looks which one it is, and takes any other object for a row."""
    if text is None:
        return Understood(error="the entry has no such field")
    if (form == "row" or (form == "auto" and not _may_be_a_change(text))) and is_object(text):
        return Understood(op="c", after=text)
    try:
        found = members(text)
        chosen = _form(found) if form == "auto" else form
        if chosen == "row":
            return Understood(op="c", after=text)
        if chosen == "cloudevents":
            return _cloud_event(found)
        change = _inner(found, "payload") if chosen == "debezium" else None
        if chosen == "debezium" and change is not None:
            return _change(change)
        return _change(found)._replace(id=_text(found, "id") if chosen == "native" else None)
    except JsonError as error:
        why = str(error)
        return Understood(error=why if why == NO_OBJECT else f"{NO_OBJECT}: {why}"[:300])
    except _NoEventError as error:
        return Understood(error=str(error))


def _may_be_a_change(text: str) -> bool:
    """False for most rows, without looking closer: no change lacks these names, unless they are written as escapes."""
    return '"op"' in text or '"specversion"' in text or "\\" in text


def _form(found: dict[str, JsonMember]) -> Format:
    if "specversion" in found:
        return "cloudevents"
    payload = _value(found, "payload")
    if isinstance(payload, dict) and _is_text(payload.get("op")):
        return "debezium"
    op = _value(found, "op")
    if _is_text(op):
        rows = (_value(found, "before"), _value(found, "after"))
        if op in ("t", "d") or any(isinstance(one, dict) for one in rows):
            return "native"
    return "row"


def _change(found: dict[str, JsonMember]) -> Understood:
    """``{op, before, after, source, ts_ms}``, wherever it stood."""
    op = _text(found, "op")
    if op is None:
        raise _NoEventError("op is missing")
    if op not in OPS:
        raise _NoEventError(f"unknown op {op[:20]}")
    before, after = _row(found, "before"), _row(found, "after")
    if before is None and after is None and op != "t":
        raise _NoEventError("neither before nor after is an object")
    source = _value(found, "source")
    origin = {name: _shown(source.get(name)) for name in _ORIGIN} if isinstance(source, dict) else {}
    return Understood(op=op, before=before, after=after, ts_ms=_milliseconds(_value(found, "ts_ms")), **origin)


def _cloud_event(found: dict[str, JsonMember]) -> Understood:
    if _text(found, "specversion") is None:
        raise _NoEventError("specversion is missing")
    own = {"id": _text(found, "id"), "subject": _text(found, "subject") or None}
    happened = (_text(found, "type") or "").rpartition(".")[2]
    when = _moment(_text(found, "time"))
    data = _inner(found, "data")
    if data is not None and _is_change(data):
        change = _change(data)
        return change._replace(ts_ms=when if change.ts_ms is None else change.ts_ms, **own)
    # A CloudEvent of somebody else's carries the row itself as its data, whatever names are in it.
    op = _OPS_BY_WORD.get(happened, "c")
    row = _row(found, "data")
    if row is None and op != "t":
        raise _NoEventError("data is no object")
    side = "before" if op == "d" else "after"
    return Understood(op=op, ts_ms=when, **own, **{side: row if op != "t" else None})


def _is_change(data: dict[str, JsonMember]) -> bool:
    """Whether it is an event of ours or Debezium's, and not a row that happens to have a column called ``op``."""
    op = _value(data, "op")
    if not _is_text(op) or op not in OPS or not ({"before", "after"} & data.keys()):
        return False
    return all(isinstance(_value(data, side), dict | None) for side in ("before", "after"))


def _is_text(value: Any) -> bool:
    return type(value) is str  # and no Number


def _value(found: dict[str, JsonMember], name: str) -> Any:
    member = found.get(name)
    return None if member is None else member.value


def _inner(found: dict[str, JsonMember], name: str) -> dict[str, JsonMember] | None:
    member = found.get(name)
    return members(member.text) if member is not None and isinstance(member.value, dict) else None


def _row(found: dict[str, JsonMember], name: str) -> str | None:
    """The row's text as it stands there; None for null. Anything else is no row."""
    member = found.get(name)
    if member is None or member.value is None:
        return None
    if not isinstance(member.value, dict):
        raise _NoEventError(f"{name} is no object")
    return member.text


def _text(found: dict[str, JsonMember], name: str) -> str | None:
    return _shown(_value(found, name))


def _shown(value: Any) -> str | None:
    return None if value is None else shown(value)


def _milliseconds(value: Any) -> int | None:
    if value is None:
        return None
    exact = value.exact() if isinstance(value, Number) else None
    if exact is None or exact != exact.to_integral_value() or not 0 <= exact <= LAST_MS:
        raise _NoEventError("ts_ms is no time: a number of milliseconds since 1970 is expected")
    return int(exact)


def _moment(text: str | None) -> int | None:
    """An RFC 3339 time in milliseconds. One that cannot be read is none: ``time`` is optional in CloudEvents."""
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text.replace("z", "Z"))
        since = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - _EPOCH
    except (ValueError, OverflowError):
        return None
    whole = since.days * 86_400_000 + since.seconds * 1_000 + since.microseconds // 1_000
    return whole if 0 <= whole <= LAST_MS else None
