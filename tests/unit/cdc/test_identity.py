"""Table identities and full names."""

from __future__ import annotations

from itertools import product

import pytest

from millstream.cdc.identity import full_name, split_full_name
from millstream.cdc.postgres.database import relation_changes
from millstream.cdc.postgres.pgoutput import Column, Relation


def test_full_names_of_different_tables_differ_and_can_be_parsed() -> None:
    parts = ["a", "a.b", 'a"', '"a"', '"', ".", '".', '."', 'a"."b', "a b", "ä\n"]
    pairs = list(product(parts, parts))
    names = [full_name(*pair) for pair in pairs]
    assert len(set(names)) == len(pairs)
    assert [split_full_name(name) for name in names] == pairs
    assert full_name("shop", "orders") == "shop.orders"
    with pytest.raises(ValueError, match="not the full name"):
        split_full_name("a.b.c")


def _relation(table: str, key: str, identity: str = "d") -> Relation:
    columns = tuple(Column(name, 25, name == key, "text") for name in ("id", "note"))
    return Relation(7, "public", table, identity, columns)


def test_relation_message_reveals_a_renamed_table_and_a_changed_key() -> None:
    recorded = {"public.orders": {"oid": 7, "keys": [["old"], ["id"]], "partitions": {}}}
    assert relation_changes(_relation("orders", "id"), "public.orders", recorded) == {}
    assert "public.other" in relation_changes(_relation("other", "id"), "public.other", recorded)["public.orders"]
    assert "is (note) now" in relation_changes(_relation("orders", "note"), "public.orders", recorded)["public.orders"]
    assert "is gone" in relation_changes(_relation("orders", ""), "public.orders", recorded)["public.orders"]
    assert relation_changes(_relation("orders", "", "f"), "public.orders", recorded) == {}, (
        "with FULL the message has no key"
    )
    assert relation_changes(_relation("orders", "note"), "public.orders", {}) == {}
