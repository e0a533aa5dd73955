"""Changes of a database's rows, as the redis sink of a pipeline writes them, for typed handlers.

The sink has two layouts of an entry's fields, and five documents that it can put into them:

======================  ===========================  ============================================
``fields:``             fields of the entry          the document is in
======================  ===========================  ============================================
``native`` (default)    event, id, key, headers      ``event``; ``headers`` has table and op, too
``debezium``            key, value, id               ``value``
======================  ===========================  ============================================

========================  =====================================================  =================
``envelope:``             document                                               the op is in
========================  =====================================================  =================
``native`` (default)      {id, op, ts_ms, source, before, after}                 the document
``debezium``              {payload: {before, after, source, op, ts_ms, ...}},    the document
                          optionally with "schema": null before the payload
``cloudevents``           {specversion, ..., data: {op, ts_ms, before, after}}   the document
``raw``                   the row after, or the row before a delete              ``headers`` alone
========================  =====================================================  =================

A handler's annotation decides what it receives, and it is the same for every layout and envelope:

- a row type (a pydantic model, a dataclass, a TypedDict, ``dict``): the row after the change, for a create, an update
  and a row of a snapshot. A delete or a truncate has no such row: the message is dead-lettered with a reason that names
  ``ChangeEvent[...]``. It is never dropped, and the old row is never passed as if it were new.
- ``ChangeEvent[Order]``: every change.
- ``Message``: the document as ``payload``, the event's id as ``uuid``, the key and the headers as metadata.

``envelope: raw`` with ``fields: debezium`` carries no op. A row type receives the row, also that of a delete; a
``ChangeEvent`` is refused. ``envelope: raw`` carries one row, so the old row of an update is None.

The documents are recognized by the exact order of their members, and by the event's id where they carry it, so that a
raw row which has columns of such names is still a row. Pure: no pydantic is loaded here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar, get_args, get_origin
from urllib.parse import unquote

from millstream.messaging.json_members import json_members

if TYPE_CHECKING:
    from millstream.messaging.message import Message

Row = TypeVar("Row")
ChangeOp = Literal["c", "u", "d", "r", "t"]
OP_NAMES = {"c": "create", "u": "update", "d": "delete", "r": "snapshot", "t": "truncate"}


@dataclass(frozen=True, slots=True)
class ChangeSource:
    """Where a change comes from. A part that the entry does not carry is None."""

    name: str | None = None
    """The source's name in the pipeline."""
    db: str | None = None
    schema: str | None = None
    table: str | None = None


@dataclass(frozen=True, slots=True)
class ChangeEvent(Generic[Row]):
    """One change of a row. ``@router.on("shop.orders", ...) async def f(event: ChangeEvent[Order])`` reads what the
    redis sink of a pipeline writes, in every layout, and also what Debezium Server writes.

    ``ChangeEvent`` without a row type has rows that are dicts.
    """

    op: ChangeOp
    """``c`` create, ``u`` update, ``d`` delete, ``r`` a row of a snapshot, ``t`` truncate: all rows of the table."""
    before: Row | None = None
    """The complete old row of an update or a delete. None where the database did not log it: PostgreSQL logs old rows
    only of tables with REPLICA IDENTITY FULL."""
    after: Row | None = None
    """The new row of a create, an update, or a snapshot."""
    source: ChangeSource = field(default_factory=ChangeSource)
    key: dict[str, Any] = field(default_factory=dict)
    """The key's columns, from the entry's key; if that is not a JSON object, from an incomplete old row. Empty for a
    truncate."""
    ts_ms: int | None = None
    """When the change happened, as the source says, in milliseconds since 1970."""
    id: str | None = None
    """The event's id: the same if the event is written again."""


def row_type(kind: Any) -> Any:
    """What the rows of ``ChangeEvent[...]`` are; None where ``kind`` is something else."""
    if kind is ChangeEvent:
        return dict
    return get_args(kind)[0] if get_origin(kind) is ChangeEvent else None


def type_name(kind: Any) -> str:
    """A handler's annotation as source code, for error messages."""
    if get_origin(kind) is ChangeEvent:
        return f"ChangeEvent[{type_name(row_type(kind))}]"
    return getattr(kind, "__name__", None) or str(kind)


# --- layouts ----------------------------------------------------------------------------------------------------------

SinkLayout = Literal["native", "debezium"]
_NATIVE_FIELDS = frozenset({b"event", b"id", b"key", b"headers"})
_DEBEZIUM_FIELDS = [b"key", b"value", b"id"]
_MARKS = (b"dlq.", b"replay.")
"""Names of fields that dead letters and replayed entries have in addition."""


def sink_layout(fields: Mapping[bytes, bytes] | None) -> SinkLayout | None:
    """The layout of an entry that the redis sink of a pipeline wrote; None for every other entry."""
    if fields is None:
        return None
    if b"event" in fields and b"id" in fields:
        # The sink always writes this header first. Another producer's field ``headers`` has another beginning.
        is_ours = fields.get(b"headers", b"").startswith(b'{"content-type":"')
        other_fields = [name for name in fields if name not in _NATIVE_FIELDS and not name.startswith(_MARKS)]
        return "native" if is_ours and not other_fields else None
    if b"value" in fields and b"id" in fields:
        names = [name for name in fields if not name.startswith(_MARKS)]
        is_document = fields[b"value"].startswith((b"{", b"null"))
        return "debezium" if names == _DEBEZIUM_FIELDS and is_document else None
    return None


def headers_of(fields: Mapping[bytes, bytes]) -> dict[str, str]:
    """The headers of an entry in the native layout. Of repeated names the first is used, because the sink writes it."""
    headers: dict[str, str] = {}
    try:
        pairs = json.loads(fields[b"headers"], object_pairs_hook=list)
    except (ValueError, RecursionError):
        return headers
    for name, value in pairs if isinstance(pairs, list) else ():
        if isinstance(value, str):
            headers.setdefault(name, value)
    return headers


# --- documents --------------------------------------------------------------------------------------------------------


class NotAChange(ValueError):
    """The message contains no change, or a change without the requested row. ``advice`` says what to do."""

    def __init__(self, why: str, advice: str | None = None) -> None:
        super().__init__(why)
        self.advice = advice


class Change(NamedTuple):
    """The change in a document. Rows are JSON texts, so that numbers keep their digits."""

    op: ChangeOp
    before: str | None = None
    after: str | None = None
    source: ChangeSource = ChangeSource()
    ts_ms: int | None = None
    id: str | None = None
    key: Mapping[str, Any] = MappingProxyType({})


def read_change(message: Message) -> Change:
    """The change that a message carries. Raises NotAChange."""
    change = _any_document(_members(message.payload)) if sink_layout(message.fields) is None else _sink_change(message)
    if change.after is None and change.op in ("c", "u", "r"):
        raise NotAChange(f"the change is a {OP_NAMES[change.op]} (op {change.op}) without a row after it")
    return change._replace(key=_key(message) or change.key)


def _sink_change(message: Message) -> Change:
    assert message.fields is not None
    layout, own_id, members = sink_layout(message.fields), _id(message), _members(message.payload)
    headers = headers_of(message.fields) if layout == "native" else {}
    change = _sink_document(members, own_id)
    if change is None and layout == "native":
        change = _raw_row(message.payload, headers)
    if change is None:
        raise NotAChange(
            "an entry of a redis sink with envelope: raw and fields: debezium does not carry the op",
            "Choose another envelope in the pipeline, or annotate the handler with the type of the row.",
        )
    table = change.source.table or headers.get("table")
    source = ChangeSource(change.source.name, change.source.db, change.source.schema, table)
    return change._replace(id=own_id, source=source)


def read_row(message: Message, name: str) -> str | bytes:
    """The JSON text of a message's row: the row after the change, or the whole payload if it is not a change.

    Raises NotAChange for a change without a row after it. ``name``: the row's type in the handler, for the error.
    """
    layout = sink_layout(message.fields)
    if layout is None:
        return message.payload
    if layout == "debezium" and _sink_document(_members(message.payload), _id(message)) is None:
        return message.payload  # a raw row, without information on what happened to it
    change = read_change(message)
    if change.after is None or change.op in ("d", "t"):
        raise NotAChange(
            f"the change is a {OP_NAMES[change.op]} (op {change.op}), which has no row after it",
            f"Annotate the handler with ChangeEvent[{name}], which has every change, then replay the dead letter.",
        )
    return change.after


def _key(message: Message) -> dict[str, Any]:
    """The key's columns; empty if the message's key is not a JSON object."""
    try:
        key = json.loads(message.key or "null")
    except (ValueError, RecursionError):
        return {}
    return key if isinstance(key, dict) else {}


def _id(message: Message) -> str:
    assert message.fields is not None
    return message.fields[b"id"].decode("utf-8", "surrogateescape")


def _members(payload: bytes) -> dict[str, str]:
    try:
        return json_members(payload.decode())
    except (ValueError, RecursionError):
        return {}


_NATIVE = ["id", "op", "ts_ms", "source", "before", "after"]
_DEBEZIUM = ["before", "after", "source", "op", "ts_ms"]
_CLOUDEVENTS_DATA = ["op", "ts_ms", "before", "after"]


def _sink_document(members: dict[str, str], own_id: str) -> Change | None:
    """The change in a document of one of the sink's envelopes; None for a raw row, whatever columns it has."""
    names = list(members)
    if names == _NATIVE:
        return _change(members) if _value(members, "id") == own_id else None
    if names in (["payload"], ["schema", "payload"]):
        payload = _object(members, "payload")
        is_ours = list(payload)[:5] == _DEBEZIUM and list(_object(payload, "source"))[:2] == ["version", "connector"]
        return _change(payload) if is_ours else None
    if names[:1] == ["specversion"] and names[-1] == "data" and _value(members, "id") == own_id:
        data = _object(members, "data")
        return _cloud_event(members, data) if list(data) == _CLOUDEVENTS_DATA else None
    return None


def _any_document(members: dict[str, str]) -> Change:
    """A change in a message that the sink did not write, or that was forwarded: any envelope, members in any order."""
    if "specversion" in members:
        data = _object(members, "data")
        if "op" in data:
            return _cloud_event(members, data)._replace(id=_text(members, "id"))
    payload = _object(members, "payload")
    change = payload if "op" in payload else members
    if "op" not in change or not ("before" in change or "after" in change):
        raise NotAChange("the message is not a change event: it has no op with before and after")
    key = _value(change, "key")  # of a ChangeEvent that a handler published
    return _change(change)._replace(id=_text(change, "id"), key=key if isinstance(key, dict) else {})


def _raw_row(payload: bytes, headers: dict[str, str]) -> Change:
    """The change of an entry in envelope ``raw``: its headers contain the op. The row of a delete is the old row."""
    op, text = _op(headers.get("op")), payload.decode("utf-8", "surrogateescape")
    row = None if text == "null" else text
    return Change(op, before=row) if op == "d" else Change(op, after=row)


def _change(members: dict[str, str]) -> Change:
    source = _object(members, "source")
    return Change(
        _op(_value(members, "op")),
        _row(members, "before"),
        _row(members, "after"),
        ChangeSource(*(_text(source, name) for name in ("name", "db", "schema", "table"))),
        _milliseconds(members),
    )


def _cloud_event(members: dict[str, str], data: dict[str, str]) -> Change:
    """``source`` is /name/db/schema/table without the parts that are null. Fewer than four
    parts are ambiguous, except the last one."""
    parts = [unquote(part) for part in (_text(members, "source") or "").split("/")[1:]]
    change = _change(data)
    if len(parts) == 4:
        return change._replace(source=ChangeSource(*parts))
    is_table = parts and f".{parts[-1]}." in (_text(members, "type") or "")
    return change._replace(source=ChangeSource(table=parts[-1] if is_table else None))


def _op(op: Any) -> ChangeOp:
    if op not in OP_NAMES:
        raise NotAChange(f"the op is not one of {', '.join(OP_NAMES)}")
    known: ChangeOp = op
    return known


def _row(members: dict[str, str], name: str) -> str | None:
    text = members.get(name, "null")
    return None if text == "null" else text


def _object(members: dict[str, str], name: str) -> dict[str, str]:
    """The members of an object that is itself a member; empty if the value is not an object."""
    text = members.get(name, "")
    return json_members(text) if text.startswith("{") else {}


def _value(members: dict[str, str], name: str) -> Any:
    try:
        return json.loads(members[name]) if name in members else None
    except (ValueError, RecursionError):  # a number of thousands of digits, for example
        return None


def _text(members: dict[str, str], name: str) -> str | None:
    value = _value(members, name)
    return value if isinstance(value, str) else None


def _milliseconds(members: dict[str, str]) -> int | None:
    value = _value(members, "ts_ms")
    return value if type(value) is int else None
