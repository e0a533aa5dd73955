"""Input documents as events: native, Debezium, CloudEvents, or any JSON object as a row.

``understand`` reads one document in Python. It takes values as their exact text, and refuses anything that is not one
complete JSON object.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from millstream.pipelines.envelopes import HAPPENED
from millstream.pipelines.events import EXCERPT_LENGTH, LAST_MS, MAX_ROW_BYTES, OPS, REFUSED, event_frame, per_row
from millstream.pipelines.json_text import (
    NO_OBJECT,
    JsonError,
    JsonMember,
    Number,
    is_encodable,
    is_object,
    members,
    template_text,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

Format = Literal["auto", "native", "debezium", "cloudevents", "row"]
_OPS_BY_WORD = {word: op for op, word in HAPPENED.items()}
_ORIGIN = ("name", "db", "schema", "table")
MAX_DOCUMENT_BYTES = MAX_ROW_BYTES
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class SourcePosition:
    """What the source knows of a document independent of its content: position, time, name."""

    id: Column
    ts_ms: Column
    name: Column
    table: Column
    key: Column | None = None
    stream: Column | None = None
    """The stream that a route processor had chosen before the event failed; known only for dead letters."""
    refused: Column | None = None
    """Why the input is refused independent of the document; null if it is not. A replay keeps such a dead letter,
    because its text is not the input itself."""


class Understood(NamedTuple):
    """The event that a document describes; missing values are None. ``error``: why it is not an event."""

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
    """The document is not an event; the message is the reason."""


def read_documents(
    frame: DataFrame, text: Column, at: SourcePosition, form: Format, *, own_ids: bool = False
) -> DataFrame:
    """``frame`` as events. A document that cannot be read keeps its text as ``payload``, with the reason.

    With ``own_ids``, native events and CloudEvents keep their own id if they have one. Otherwise, and by default, the
    position is the id, which is unique independent of the producers.
    """
    from pyspark.sql import functions as F

    def read(document: str | None) -> Understood:
        return understand(document, form)

    key = (F.lit(None) if at.key is None else at.key).cast("string")
    bad_key = F.when(~F.is_valid_utf8(key), F.lit("the key is not valid UTF-8"))
    refused = (F.lit(None) if at.refused is None else at.refused).cast("string")
    document = text.cast("string")
    size = F.octet_length(document)
    is_too_large = size > MAX_DOCUMENT_BYTES
    refused = F.coalesce(F.when(is_too_large, too_large(size)), refused)
    # Columns of the input that form the position are kept next to the document.
    shaped = frame.withColumns(
        {
            "_id": legible(at.id.cast("string")),
            # Entry ids can have more than 64 bits of milliseconds, and times after the year 9999 cannot be written.
            "_ts": F.when(at.ts_ms.between(0, LAST_MS), at.ts_ms).cast("bigint"),
            "_name": at.name.cast("string"),
            "_table": at.table.cast("string"),
            "_key": legible(key),
            "_stream": (F.lit(None) if at.stream is None else at.stream).cast("string"),
            "_text": legible(F.when(is_too_large, F.substring(document, 1, EXCERPT_LENGTH)).otherwise(document)),
            "_refused": F.concat(F.lit(REFUSED), F.coalesce(bad_key, refused)),
        }
    ).withColumn("_d", per_row(read, _STRUCT, F.col("_text")))
    error = F.coalesce(F.col("_refused"), F.col("_d.error"))
    fine = error.isNull()
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
        "stream": F.col("_stream"),
        "payload": F.when(~fine, F.col("_text")),
        "error": error,
        "stage": F.when(~fine, F.lit("source")),
    }
    return event_frame(shaped, columns, plain=("op",))  # one of OPS, or null


def too_large(size: Column) -> Column:
    """The reason why an input of so many bytes is refused."""
    from pyspark.sql import functions as F

    limit = F.lit(f" bytes, and a pipeline reads at most {MAX_DOCUMENT_BYTES}")
    return F.concat(F.lit("it has "), size.cast("string"), limit)


def legible(text: Column) -> Column:
    """Bytes that are not UTF-8 as base64: Python could not read them, and Spark's JSON functions would change them."""
    from pyspark.sql import functions as F

    encoded = F.concat(F.lit("base64:"), F.base64(text.cast("binary")))
    return F.when(text.isNull() | F.is_valid_utf8(text), text).otherwise(encoded)


def understand(text: str | None, form: Format) -> Understood:
    """One document as an event of ``form``; ``auto`` detects the form, and treats any other object as a row."""
    if text is None:
        return Understood(error="the entry has no such field")
    if (form == "row" or (form == "auto" and not _may_be_a_change(text))) and is_object(text):
        return Understood(op="c", after=text)
    try:
        document = members(text)
        chosen = _form(document) if form == "auto" else form
        if chosen == "row":
            return Understood(op="c", after=text)
        if chosen == "cloudevents":
            return _cloud_event(document)
        change = _inner(document, "payload") if chosen == "debezium" else None
        if chosen == "debezium" and change is not None:
            return _change(change)
        return _change(document)._replace(id=_id(document) if chosen == "native" else None)
    except JsonError as error:
        why = str(error)
        return Understood(error=why if why == NO_OBJECT else f"{NO_OBJECT}: {why}"[:300])
    except _NoEventError as error:
        return Understood(error=str(error))


def _may_be_a_change(text: str) -> bool:
    """A cheap test, false for most rows: every change has these names, perhaps written with escapes."""
    return '"op"' in text or '"specversion"' in text or "\\" in text


def _form(document: dict[str, JsonMember]) -> Format:
    if "specversion" in document:
        return "cloudevents"
    payload = _value(document, "payload")
    if isinstance(payload, dict) and _is_text(payload.get("op")) and not _is_row_with_op_t(payload):
        return "debezium"
    values = {name: member.value for name, member in document.items()}
    has_row = any(isinstance(values.get(side), dict) for side in ("before", "after"))
    is_change = _is_text(values.get("op")) and not _is_row_with_op_t(values)
    return "native" if is_change and (has_row or values["op"] == "t") else "row"


def _is_row_with_op_t(document: dict[str, Any]) -> bool:
    """Whether ``t`` is the value of a column. A truncate has no rows, but it names its source, and both sides are
    present and null. A row that was read as a truncate would be lost."""
    if document.get("op") != "t":
        return False
    sides = ("before", "after")
    if any(isinstance(document.get(side), dict) for side in sides):
        return False
    return not (isinstance(document.get("source"), dict) and all(side in document for side in sides))


def _change(document: dict[str, JsonMember]) -> Understood:
    """Reads ``{op, before, after, source, ts_ms}``."""
    op = _text(document, "op")
    if op is None:
        raise _NoEventError("op is missing")
    if op not in OPS:
        raise _NoEventError(f"unknown op {op[:20]}")
    before, after = _row(document, "before"), _row(document, "after")
    if before is None and after is None and op != "t":
        raise _NoEventError("neither before nor after is an object")
    source = _value(document, "source")
    origin = {name: _name_text(source.get(name)) for name in _ORIGIN} if isinstance(source, dict) else {}
    return Understood(op=op, before=before, after=after, ts_ms=_milliseconds(_value(document, "ts_ms")), **origin)


def _cloud_event(document: dict[str, JsonMember]) -> Understood:
    if _text(document, "specversion") is None:
        raise _NoEventError("specversion is missing")
    own = {"id": _id(document), "subject": _text(document, "subject") or None}
    happened = (_text(document, "type") or "").rpartition(".")[2]
    when = _moment(_text(document, "time"))
    data = _inner(document, "data")
    if data is not None and _is_change(data):
        change = _change(data)
        return change._replace(ts_ms=when if change.ts_ms is None else change.ts_ms, **own)
    # The data of another producer's CloudEvent is the row itself, whatever its names are.
    op = _OPS_BY_WORD.get(happened, "c")
    row = _row(document, "data")
    if op == "t" and row is not None:
        op = "c"  # the type of another producer that ends in this word: its row must not be lost
    if row is None and op != "t":
        raise _NoEventError("data is no object")
    side = "before" if op == "d" else "after"
    return Understood(op=op, ts_ms=when, **own, **{side: row if op != "t" else None})


def _is_change(data: dict[str, JsonMember]) -> bool:
    """Whether it is our event or Debezium's, and not a row that has a column ``op``."""
    op = _value(data, "op")
    if not _is_text(op) or op not in OPS or not ({"before", "after"} & data.keys()):
        return False
    return all(isinstance(_value(data, side), dict | None) for side in ("before", "after"))


def _is_text(value: Any) -> bool:
    return type(value) is str  # and no Number


def _value(document: dict[str, JsonMember], name: str) -> Any:
    member = document.get(name)
    return None if member is None else member.value


def _inner(document: dict[str, JsonMember], name: str) -> dict[str, JsonMember] | None:
    member = document.get(name)
    return members(member.text) if member is not None and isinstance(member.value, dict) else None


def _row(document: dict[str, JsonMember], name: str) -> str | None:
    """The exact text of the row; None for null. Raises for any other value."""
    member = document.get(name)
    if member is None or member.value is None:
        return None
    if not isinstance(member.value, dict):
        raise _NoEventError(f"{name} is no object")
    return member.text


def _text(document: dict[str, JsonMember], name: str) -> str | None:
    return _name_text(_value(document, name))


def _id(document: dict[str, JsonMember]) -> str | None:
    """The event's own id. An empty one counts as missing: all events that have it would be taken for one event."""
    return _text(document, "id") or None


def _name_text(value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, str) and not is_encodable(value):
        raise _NoEventError("a name or an id contains half of a surrogate pair, which cannot be stored")
    return template_text(value)


def _milliseconds(value: Any) -> int | None:
    if value is None:
        return None
    exact = value.exact() if isinstance(value, Number) else None
    if exact is None or exact != exact.to_integral_value() or not 0 <= exact <= LAST_MS:
        raise _NoEventError("ts_ms is no time: a number of milliseconds since 1970 is expected")
    return int(exact)


def _moment(text: str | None) -> int | None:
    """An RFC 3339 time in milliseconds; None if it cannot be read, because ``time`` is optional in CloudEvents."""
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text.replace("z", "Z"))
        since = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - _EPOCH
    except (ValueError, OverflowError):
        return None
    whole = since.days * 86_400_000 + since.seconds * 1_000 + since.microseconds // 1_000
    return whole if 0 <= whole <= LAST_MS else None
