"""Typed values: an entry keeps the types of its values, over every transport, if the reader asks for them."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millstream import open_broker
from millstream.errors import InvalidArgument
from millstream.model import Delivery, Entry, EntryId, from_json_fields, to_json_fields

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5)


async def test_types_come_back_from_an_entry_and_from_a_delivery(broker_url: str) -> None:
    values: dict[str, Any] = {
        "id": 123456789012345678901234567890,
        "paid": True,
        "note": "007",
        "nothing": None,
        "ratio": 0.1,
        "lines": [{"sku": "a", "n": 1}, []],
        "größe": "ä",
    }
    async with open_broker(broker_url) as broker:
        added = await broker.xadd("orders", to_json_fields(values))
        await broker.create_group("orders", "g", start="0")
        (entry,) = await broker.xrange("orders")
        (delivery,) = await broker.xreadgroup("orders", "g", "c", count=10)
    assert entry.id == added
    assert entry.values() == delivery.values() == values
    assert [type(value) for value in entry.values().values()] == [type(value) for value in values.values()]
    assert entry.fields[b"note"] == b'"007"'


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(NAMES, JSON, max_size=4))
def test_every_json_value_survives_a_round_trip(values: dict[str, Any]) -> None:
    fields = {name.encode(): value for name, value in to_json_fields(values).items()}
    assert repr(from_json_fields(fields)) == repr(values)


def test_a_decimal_keeps_its_digits_on_the_wire() -> None:
    assert to_json_fields({"price": Decimal("1.10")}) == {"price": b"1.10"}


@pytest.mark.parametrize("value", [math.nan, math.inf, b"bytes", {1, 2}, Decimal("NaN"), [[math.nan]]])
def test_value_that_json_cannot_hold_is_refused_with_its_field(value: object) -> None:
    with pytest.raises(InvalidArgument, match="odd"):
        to_json_fields({"odd": value})


def test_values_of_other_writers_are_text_or_bytes() -> None:
    plain = {b"type": b"email", b"n": b"7", b"blob": b"\xff", b"odd": b"NaN"}
    assert Entry(EntryId(1), plain).values() == {"type": "email", "n": 7, "blob": b"\xff", "odd": "NaN"}


def test_a_delivery_whose_entry_is_gone_has_no_values() -> None:
    assert Delivery(EntryId(1), None).values() == {}
