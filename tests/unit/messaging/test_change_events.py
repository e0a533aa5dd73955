"""Typed handlers read the entries that the redis sink of a pipeline writes, in every layout and envelope.

No ``from __future__ import annotations`` here: classes inside tests could not be resolved by name.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, TypeVar

import pytest
from pydantic import BaseModel, ConfigDict
from typing_extensions import TypedDict  # pydantic requires this one before Python 3.12

from millstream import Broker, Message, Publisher, Router, open_broker
from millstream.cqrs import EventBus
from millstream.messaging import (
    CannotUnmarshal,
    ChangeEvent,
    ChangeSource,
    DeadLetters,
    HandlerRefused,
    PydanticMarshaler,
)
from millstream.messaging.codecs import codec
from millstream.model import EntryId
from millstream.testing import eventually
from support.sink_entries import (
    DB,
    ENVELOPES,
    ID,
    KEY,
    LAYOUTS,
    NAME,
    OLD_ROW,
    OPS,
    ROW,
    SCHEMA,
    TABLE,
    TS_MS,
    document,
    entry,
)


class Order(BaseModel):
    model_config = ConfigDict(extra="forbid")

    id: int
    total: Decimal
    exact: Decimal
    note: str | None


@dataclass
class OrderRow:
    id: int
    total: Decimal
    exact: Decimal
    note: str | None


class OrderFields(TypedDict):
    id: int
    total: str
    exact: Decimal
    note: str | None


AFTER: dict[Any, Any] = {
    Order: Order(id=7, total=Decimal("9.90"), exact=Decimal("1.10"), note=None),
    OrderRow: OrderRow(7, Decimal("9.90"), Decimal("1.10"), None),
    OrderFields: {"id": 7, "total": "9.90", "exact": Decimal("1.10"), "note": None},
    dict: {"id": 7, "total": "9.90", "exact": 1.1, "note": None},
}
BEFORE: dict[Any, Any] = {
    Order: Order(id=7, total=Decimal("5.00"), exact=Decimal("1.00"), note="n"),
    OrderRow: OrderRow(7, Decimal("5.00"), Decimal("1.00"), "n"),
    OrderFields: {"id": 7, "total": "5.00", "exact": Decimal("1.00"), "note": "n"},
    dict: {"id": 7, "total": "5.00", "exact": 1.0, "note": "n"},
}
ROW_TYPES = list(AFTER)
ALL = [(layout, envelope) for layout in LAYOUTS for envelope in ENVELOPES]
WITH_OP = [pair for pair in ALL if pair != ("debezium", "raw")]
"""``envelope: raw`` with ``fields: debezium`` writes the row and nothing else: no reader can know the op."""


class _Origin:
    topic, group, consumer = "shop.orders", "billing", "c1"

    def settle(self, message: Message, outcome: Any) -> None: ...


def received(fields: dict[bytes, bytes]) -> Message:
    return codec("flat").decode(fields).receive(_Origin(), EntryId(5, 1), 1, fields)


def unmarshal(fields: dict[bytes, bytes], kind: Any) -> Any:
    return PydanticMarshaler().unmarshal(received(fields), kind)


# --- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["c", "u", "r"])
@pytest.mark.parametrize("kind", ROW_TYPES)
@pytest.mark.parametrize(("layout", "envelope"), ALL)
def test_row_type_receives_the_row_after_the_change(layout: str, envelope: str, kind: Any, op: str) -> None:
    assert unmarshal(entry(layout, envelope, op), kind) == AFTER[kind]


@pytest.mark.parametrize("op", ["d", "t"])
@pytest.mark.parametrize("kind", ROW_TYPES)
@pytest.mark.parametrize(("layout", "envelope"), WITH_OP)
def test_row_type_refuses_a_delete_and_a_truncate_and_names_the_type_to_use(
    layout: str, envelope: str, kind: Any, op: str
) -> None:
    with pytest.raises(CannotUnmarshal) as caught:
        unmarshal(entry(layout, envelope, op), kind)
    assert f"ChangeEvent[{kind.__name__}]" in str(caught.value)
    assert {"d": "delete", "t": "truncate"}[op] in str(caught.value)
    assert "9.90" not in str(caught.value)


def test_row_without_op_receives_the_row_of_a_delete_and_refuses_a_truncate() -> None:
    assert unmarshal(entry("debezium", "raw", "d"), Order) == BEFORE[Order]
    with pytest.raises(CannotUnmarshal):
        unmarshal(entry("debezium", "raw", "t"), Order)


# --- change events ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("kind", ROW_TYPES)
@pytest.mark.parametrize(("layout", "envelope"), WITH_OP)
def test_change_event_has_op_rows_and_source(layout: str, envelope: str, kind: Any, op: str) -> None:
    event = unmarshal(entry(layout, envelope, op), ChangeEvent[kind])
    raw = envelope == "raw"
    assert event.op == op
    assert event.after == (AFTER[kind] if op in "cur" else None)
    # The raw envelope has one row: the old row of an update is not written.
    assert event.before == (BEFORE[kind] if op == "d" or (op == "u" and not raw) else None)
    assert event.source == (ChangeSource(table=TABLE) if raw else ChangeSource(NAME, DB, SCHEMA, TABLE))
    assert event.key == ({} if op == "t" else {"id": 7})
    assert event.ts_ms == (None if raw else TS_MS)
    assert event.id == ID


@pytest.mark.parametrize("kind", [ChangeEvent, ChangeEvent[dict], ChangeEvent[dict[str, Any]], ChangeEvent[Any]])
@pytest.mark.parametrize(("layout", "envelope"), WITH_OP)
def test_change_event_without_a_row_type_has_dicts(layout: str, envelope: str, kind: Any) -> None:
    event = unmarshal(entry(layout, envelope, "d"), kind)
    assert (event.op, event.before, event.after) == ("d", BEFORE[dict], None)


@pytest.mark.parametrize("op", OPS)
def test_change_event_refuses_a_layout_that_does_not_carry_the_op(op: str) -> None:
    with pytest.raises(CannotUnmarshal, match="envelope"):
        unmarshal(entry("debezium", "raw", op), ChangeEvent[Order])


@pytest.mark.parametrize(("layout", "envelope"), WITH_OP)
def test_delete_with_only_the_key_columns_has_no_row_before(layout: str, envelope: str) -> None:
    """PostgreSQL logs only the key of a deleted row unless the table has REPLICA IDENTITY FULL."""
    fields = entry(layout, envelope, "d")
    fields = {name: value.replace(OLD_ROW.encode(), b'{"id":7}') for name, value in fields.items()}
    event = unmarshal(fields, ChangeEvent[Order])
    assert (event.op, event.before, event.after, event.key) == ("d", None, None, {"id": 7})
    assert unmarshal(fields, ChangeEvent[dict]).before == {"id": 7}


def test_incomplete_old_row_is_the_key_if_the_entry_s_key_is_plain_text() -> None:
    fields = entry("native", "native", "d") | {b"key": b"customer-3"}
    fields = {name: value.replace(OLD_ROW.encode(), b'{"id":7}') for name, value in fields.items()}
    event = unmarshal(fields, ChangeEvent[Order])
    assert (event.before, event.key) == (None, {"id": 7})


def test_invalid_values_are_refused_and_not_shown() -> None:
    fields = {name: value.replace(b'"9.90"', b'"secret"') for name, value in entry("native", "native", "u").items()}
    for kind in (Order, ChangeEvent[Order]):
        with pytest.raises(CannotUnmarshal, match=r"after\.total") as caught:
            unmarshal(fields, kind)
        assert "secret" not in str(caught.value)


def test_invalid_old_row_is_refused() -> None:
    fields = {name: value.replace(b'"5.00"', b'"secret"') for name, value in entry("native", "native", "u").items()}
    with pytest.raises(CannotUnmarshal, match=r"before\.total"):
        unmarshal(fields, ChangeEvent[Order])
    assert unmarshal(fields, Order) == AFTER[Order]


HOSTILE = [
    *(
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"{}",
        b'{"a":1}}',
        b'{"a" 1}',
        b'{"a":}',
        b"{,}",
        b'{"a":1,}',
        b"\xff",
        b"NaN",
    ),
    *(b'{"a":' * 5_000, b'{"payload":{"op":"c","after":{"id":"\\ud800"}}}', b'{"n":' + b"9" * 5_000 + b"}"),
    *(b'{"id":"shop:26:3","op":"x","ts_ms":1,"source":{},"before":null,"after":{}}',),
    *(b'{"id":"shop:26:3","op":"c","ts_ms":"x","source":7,"before":7,"after":[]}',),
    *(b'{"specversion":"1.0","data":7}', b'{"payload":7}', b'{"schema":null,"payload":{"before":1}}'),
]


@pytest.mark.parametrize("kind", [Order, ChangeEvent[Order]])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("text", HOSTILE, ids=[str(number) for number in range(len(HOSTILE))])
def test_broken_documents_are_refused(layout: str, text: bytes, kind: Any) -> None:
    fields = entry(layout, "native", "c")
    fields[b"event" if layout == "native" else b"value"] = text
    with pytest.raises(CannotUnmarshal):
        unmarshal(fields, kind)


@pytest.mark.parametrize(("layout", "envelope"), ALL)
def test_raw_row_with_the_columns_of_an_envelope_is_a_row(layout: str, envelope: str) -> None:
    """A table may hold events of another system: its rows are not taken for the envelope of this one."""
    stored = document(envelope, "d").replace(ID, "other:1").replace("connector", "db_connector")
    fields = entry(layout, "raw", "c")
    fields[b"event" if layout == "native" else b"value"] = stored.encode()
    assert unmarshal(fields, dict) == json.loads(stored)


# --- what is not written by the sink ----------------------------------------------------------------------------------


def test_other_entries_are_read_as_before() -> None:
    plain = {b"event": b'{"a":1}', b"id": b"7", b"headers": b"none"}
    assert unmarshal(plain, dict) == {"event": '{"a":1}', "id": "7", "headers": "none"}
    flat = codec("flat").encode(Message(b'{"op": "c", "after": 1}'))
    assert unmarshal(flat, dict) == {"op": "c", "after": 1}
    more = entry("native", "native", "c") | {b"colour": b"red"}
    assert unmarshal(more, dict)["colour"] == "red"
    for other in ({b"id": b"7", b"key": b"k", b"value": b'{"a":1}'}, {b"key": b"k", b"value": b"text", b"id": b"7"}):
        assert unmarshal(other, dict)["key"] == "k"


def test_change_event_reads_debezium_s_own_entries_and_forwarded_ones() -> None:
    payload = {"before": None, "after": json.loads(ROW), "source": {"table": "orders"}, "op": "c", "ts_ms": 5}
    schema = {"schema": {"type": "struct"}, "payload": payload | {"ts_us": 5000, "transaction": None}}
    for value in (payload, schema):
        event = unmarshal({b"key": b'{"id":7}', b"value": json.dumps(value).encode()}, ChangeEvent[Order])
        assert (event.op, event.after.id, event.source.table, event.key) == ("c", 7, "orders", {"id": 7})
    for envelope in ENVELOPES[:-1]:
        forwarded = codec("flat").encode(received(entry("native", envelope, "d")).copy())
        assert unmarshal(forwarded, ChangeEvent[Order]).before == BEFORE[Order]
    with pytest.raises(CannotUnmarshal, match="not a change event"):
        unmarshal(codec("flat").encode(Message(b'{"number": 1}')), ChangeEvent[Order])


@pytest.mark.parametrize("op", OPS)
def test_change_event_can_be_published(op: str) -> None:
    event = unmarshal(entry("native", "native", op), ChangeEvent[Order])
    fields = codec("flat").encode(PydanticMarshaler().marshal(event))
    again = unmarshal(fields, ChangeEvent[Order])
    assert again == event


@pytest.mark.parametrize("layout", LAYOUTS)
def test_untyped_handler_sees_the_document_and_the_headers(layout: str) -> None:
    message = received(entry(layout, "native", "u"))
    assert message.payload == document("native", "u").encode()
    assert (message.uuid, message.key) == (ID, KEY)
    headers = {"content-type": "application/json", "table": TABLE, "op": "u", "tenant": "acme"}
    assert message.metadata == {"key": KEY} | (headers if layout == "native" else {})
    assert message.fields == entry(layout, "native", "u")


def test_header_of_the_user_does_not_replace_op_table_or_key() -> None:
    headers = b'{"content-type":"application/json","table":"orders","op":"d","op":"c","table":"x","key":"k"}'
    fields = entry("native", "raw", "d") | {b"headers": headers}
    assert (received(fields).metadata["op"], received(fields).key) == ("d", KEY)
    assert unmarshal(fields, ChangeEvent[Order]).op == "d"


def test_replayed_entry_is_read_like_the_first() -> None:
    fields = entry("native", "native", "u")
    message = codec("flat").decode(fields)
    message.receive(_Origin(), EntryId(5, 1), 1, fields | {b"replay.of": b"1-1", b"replay.group": b"billing"})
    assert PydanticMarshaler().unmarshal(message, Order) == AFTER[Order]


# --- registration -----------------------------------------------------------------------------------------------------

T = TypeVar("T")


@pytest.mark.parametrize("row", [str, int, list, bytes, list[int], T, object, Message])
def test_row_types_that_no_row_fits_are_refused(row: Any) -> None:
    async def handler(event: Any) -> None: ...

    async def batch_handler(events: Any) -> None: ...

    handler.__annotations__["event"] = ChangeEvent[row]
    batch_handler.__annotations__["events"] = list[ChangeEvent[row]]
    with pytest.raises(HandlerRefused, match="event"):
        Router().add(handler, "orders", group="g", group_start="0")
    with pytest.raises(HandlerRefused, match="event"):
        Router().add(batch_handler, "orders", group="g", group_start="0", batch=2)


# --- in a router ------------------------------------------------------------------------------------------------------


async def put_all(broker: Broker, topic: str, layout: str, envelope: str) -> None:
    for op in OPS:
        await broker.xadd(topic, entry(layout, envelope, op))


def dead_letters(broker: Broker, topic: str, count: int) -> Callable[[], Any]:
    async def has_them() -> bool:
        return await DeadLetters(broker, topic).count() == count

    return has_them


@pytest.mark.parametrize(("layout", "envelope"), WITH_OP)
async def test_router_calls_typed_handlers(layout: str, envelope: str) -> None:
    orders: list[Any] = []
    events: list[Any] = []
    batches: list[Any] = []
    async with open_broker("local://") as broker:
        router = Router(broker, group_start="0")

        @router.on("shop.orders", group="rows")
        async def rows(order: Order) -> None:
            orders.append(order)

        @router.on("shop.orders", group="events", publish_to="audit")
        async def changes(event: ChangeEvent[Order], message: Message) -> ChangeEvent[Order]:
            assert message.uuid == ID
            return event

        @router.on("audit", group="audit")
        def audit(event: ChangeEvent[Order]) -> None:
            events.append((event.op, event.after))

        @router.on("shop.orders", group="batches", batch=5, linger_ms=5)
        async def batch(changes: list[ChangeEvent[Order]]) -> None:
            batches.extend(event.op for event in changes)

        @router.on("shop.orders", group="row-batches", batch=3, linger_ms=5)
        def row_batch(rows: list[Order]) -> None:
            batches.extend("row" for _ in rows)

        await put_all(broker, "shop.orders", layout, envelope)
        async with router:
            await eventually(lambda: len(orders) == 3 and len(events) == 5 and len(batches) == 8)
            await eventually(dead_letters(broker, "shop.orders", 4))
        reasons = {letter.details.error for letter in await DeadLetters(broker, "shop.orders").list() if letter.details}
    assert orders == [AFTER[Order]] * 3
    assert dict(events) == {op: AFTER[Order] if op in "cur" else None for op in OPS}
    assert sorted(batches) == sorted([*OPS, "row", "row", "row"])
    assert len(reasons) == 2
    assert all("ChangeEvent[Order]" in reason for reason in reasons)


async def test_event_bus_handles_rows_and_change_events_of_one_stream() -> None:
    previous: list[Any] = []
    async with open_broker("local://") as broker:
        bus = EventBus(broker, service="billing", group_start="0", topic=lambda name: f"shop.{name.lower()}s")

        @bus.handler
        async def row(order: Order) -> None:
            previous.append(order.id)

        @bus.handler
        async def change(event: ChangeEvent[Order]) -> None:
            previous.append(event.op)

        await put_all(broker, "shop.orders", "native", "native")
        async with bus:
            await eventually(lambda: len(previous) == 8)
    assert sorted(map(str, previous)) == sorted(["7", "7", "7", *OPS])


async def test_order_of_keys_is_kept() -> None:
    """The entry's key is the message's key: ``ordered_by_key`` works on change streams."""
    previous: list[str] = []
    async with open_broker("local://") as broker:
        router = Router(broker, group_start="0")

        @router.on("shop.orders", group="g", ordered_by_key=True)
        async def change(event: ChangeEvent[Order]) -> None:
            previous.append(event.op)

        await put_all(broker, "shop.orders", "debezium", "debezium")
        async with router, Publisher(broker):
            await eventually(lambda: len(previous) == 5)
    assert [op for op in previous if op != "t"] == ["c", "u", "d", "r"]
