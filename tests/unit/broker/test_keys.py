"""Companion keys lie beside their stream, in its slot."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.broker.keys import LEGEND, beside, migrating_key, slot_of
from millstream.errors import InvalidArgument


def test_known_slots() -> None:
    """As a real cluster gives them."""
    assert slot_of(b"orders") == 105
    assert slot_of(b"orders.dlq") == 14260
    assert slot_of(b"{orders}.dlq") == 105
    assert slot_of(b"foo{}{bar}") == slot_of(b"foo{}{bar}")
    assert slot_of(b"123456789") == 0x31C3 % 16384


def test_where_companions_lie() -> None:
    assert beside("orders", "dlq") == b"{orders}.dlq"
    assert beside("{orders}.eu", "dlq") == b"{orders}.eu.dlq"
    assert beside(b"a{b", "x") == b"{a{b}.x"


@given(st.binary(min_size=1, max_size=12))
def test_they_share_the_slot(name: bytes) -> None:
    try:
        assert slot_of(beside(name, "x")) == slot_of(name)
    except InvalidArgument:
        assert b"}" in name


def test_a_name_that_cannot_have_companions() -> None:
    with pytest.raises(InvalidArgument):
        beside("a}b", "dlq")


def test_the_legend_tells_how_every_key_ends() -> None:
    assert all(line.holds and line.ends for line in LEGEND)
    assert len({line.suffix for line in LEGEND}) == len(LEGEND)


@pytest.mark.parametrize(
    "key", [b"orders", b"{orders}", b"{tag}ged", b"odd}name", b"}{", b"{}", b"{}x{tag}", b"{", b""]
)
def test_a_key_is_made_in_its_own_slot_whatever_its_name(key: bytes) -> None:
    half = migrating_key(key)
    assert half != key
    assert slot_of(half) == slot_of(key)
    assert migrating_key(key) == half, "the next run must find what this one left"
