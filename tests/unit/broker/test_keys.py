"""Companion keys are in the slot of their stream."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.broker.keys import LEGEND, companion_key, migration_key, slot_of
from millstream.errors import InvalidArgument


def test_known_slots() -> None:
    """As a real cluster gives them."""
    assert slot_of(b"orders") == 105
    assert slot_of(b"orders.dlq") == 14260
    assert slot_of(b"{orders}.dlq") == 105
    assert slot_of(b"foo{}{bar}") == slot_of(b"foo{}{bar}")
    assert slot_of(b"123456789") == 0x31C3 % 16384


def test_names_of_companion_keys() -> None:
    assert companion_key("orders", "dlq") == b"{orders}.dlq"
    assert companion_key("{orders}.eu", "dlq") == b"{orders}.eu.dlq"
    assert companion_key(b"a{b", "x") == b"{a{b}.x"


@given(st.binary(min_size=1, max_size=12))
def test_companion_keys_share_the_slot(name: bytes) -> None:
    try:
        assert slot_of(companion_key(name, "x")) == slot_of(name)
    except InvalidArgument:
        assert b"}" in name


def test_name_with_unbalanced_brace_has_no_companions() -> None:
    with pytest.raises(InvalidArgument):
        companion_key("a}b", "dlq")


def test_legend_states_the_expiry_of_every_key() -> None:
    assert all(line.holds and line.ends for line in LEGEND)
    assert len({line.suffix for line in LEGEND}) == len(LEGEND)


@pytest.mark.parametrize(
    "key", [b"orders", b"{orders}", b"{tag}ged", b"odd}name", b"}{", b"{}", b"{}x{tag}", b"{", b""]
)
def test_migration_key_is_in_the_slot_of_its_key(key: bytes) -> None:
    half = migration_key(key)
    assert half != key
    assert slot_of(half) == slot_of(key)
    assert migration_key(key) == half, "the next run must find what this one left"
