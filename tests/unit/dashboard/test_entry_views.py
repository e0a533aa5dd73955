"""Entries as people see them: JSON as it was written, text, bytes; cut where they are long, whatever they hold."""

from __future__ import annotations

import json

import pytest

from millstream import open_broker
from millstream.dashboard.entries import (
    SHOWN_BYTES,
    indented,
    matches,
    parse_start,
    read_page,
    search,
    show_payload,
    view,
)
from millstream.dashboard.feed import HELD, Follower, Shown
from millstream.dashboard.pages.dead_letters import stream_of
from millstream.dashboard.render import Query, Renderer, address, curve, local_address, name_word, short, word_name
from millstream.errors import InvalidArgument
from millstream.model import Entry, EntryId


@pytest.mark.parametrize(
    "text",
    [
        '{"a":1.10,"b":[1e400,{}],"a":2}',
        "[]",
        "{}",
        '[[],{},[{}],"\\"]},[{"]',
        '{"deep":[[[[[1]]]]],"text":"a\\\\"}',
        ' [ 1 , "two" , null ] ',
    ],
)
def test_json_is_laid_out_word_for_word(text: str) -> None:
    shown = indented(text)

    assert "".join(shown.split()) == "".join(text.split())
    assert json.loads(shown) == json.loads(text)


def test_json_is_laid_out_as_people_expect_it() -> None:
    assert indented('{"a":[1,{"b":[]}],"c":{}}') == json.dumps({"a": [1, {"b": []}], "c": {}}, indent=2)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b'{"a": 1}', "JSON"),
        (b"[" * 5000, "text"),
        (b"12", "text"),
        ("größer".encode(), "text"),
        (b"\xff\xfe", "bytes"),
        (b"\x00\x01\x02" * 30, "bytes"),
        (b"", "text"),
        (b"9" * 5000, "text"),
    ],
)
def test_a_payload_is_shown_as_what_it_is(body: bytes, kind: str) -> None:
    assert show_payload(body).kind == kind


def test_a_hundred_megabytes_are_told_and_not_shown() -> None:
    huge = Entry(EntryId(1767225600000, 0), {b"payload": b"x" * 100_000_000, b"uuid": b"u"})

    shown = view(huge, 1767225601000)

    assert shown.size == 100_000_012
    assert len(shown.payload.text) == SHOWN_BYTES
    assert shown.payload.cut == "The first 16.4 kB of 100.0 MB."
    assert sum(len(field.value) for field in shown.fields) < 3_000


def test_a_text_is_found_in_names_values_packed_metadata_and_ids() -> None:
    from millstream.messaging import Message, codec

    packed = Entry(EntryId(5, 1), codec("watermill").encode(Message(b"body", {"Tenant": "ACME"})))
    plain = Entry(EntryId(77, 3), {b"Colour": b"Dark BLUE", b"raw": b"\xff\xfe"})

    assert matches(packed, "acme")
    assert matches(packed, "tenant")
    assert matches(plain, "colour")
    assert matches(plain, "dark blue")
    assert matches(plain, "77-3")
    assert not matches(plain, "green")


@pytest.mark.parametrize(
    ("text", "id"),
    [
        ("1767225600000", "1767225600000-0"),
        ("5-7", "5-7"),
        ("2026-01-01 00:00", "1767225600000-0"),
        ("2026-01-01T01:00:00+01:00", "1767225600000-0"),
        ("2026-01-01 00:00:00 UTC", "1767225600000-0"),
    ],
)
def test_a_place_is_an_id_or_a_time(text: str, id: str) -> None:
    assert parse_start(text) == id


@pytest.mark.parametrize("text", ["yesterday", "1-2-3", "-", "99999999999999999999999-0", "0001-01-01x"])
def test_what_is_neither_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidArgument, match="such as"):
        parse_start(text)


async def test_a_page_ends_where_its_entries_are_too_large_and_the_next_goes_on() -> None:
    async with open_broker("local://entry-views", max_stream_len=None) as broker:
        ids = [await broker.xadd("big", {"n": str(n), "x": b"x" * 3_000_000}) for n in range(5)]
        found: list[EntryId] = []
        start: str | None = ""
        pages = 0
        while start is not None:
            page = await read_page(broker, "big", start, oldest_first=True)
            found += [entry.id for entry in page.entries]
            start, pages = page.next_id, pages + 1
        assert found == ids
        assert pages > 1
        newest = await read_page(broker, "big", "", oldest_first=False)
        assert newest.entries[0].id == ids[-1]
        await broker.delete_stream("big")


async def test_a_search_that_finds_much_goes_on_behind_the_last() -> None:
    async with open_broker("local://entry-views", max_stream_len=None) as broker:
        await broker.xadd_many("many", [{"n": str(n)} for n in range(130)])
        found: list[Entry] = []
        searched = 0
        start: str | None = ""
        while start is not None:
            part = await search(broker, "many", "n", start, oldest_first=False)
            found += part.entries
            searched += part.searched
            start = part.next_id
        assert [entry.fields[b"n"] for entry in found] == [b"%d" % n for n in reversed(range(130))]
        assert searched == 130
        await broker.delete_stream("many")


@pytest.mark.parametrize("raw", [b"orders", b"{a}.b", b"a b&c=d?#/%25", bytes(range(256)), b"\xc3\xbc\xe2\x80\xae<b>"])
def test_any_name_travels_in_an_address_and_comes_back(raw: bytes) -> None:
    name = raw.decode("utf-8", "surrogateescape")
    link = address("/stream", [("name", name_word(name))])

    assert link.isascii()
    assert Query(link.partition("?")[2]).name("name") == name
    assert word_name(name_word(name)) == name


def test_plain_names_stay_readable_in_addresses() -> None:
    assert address("/stream", [("name", name_word("{demo}.orders:1"))]) == "/stream?name={demo}.orders:1"


@pytest.mark.parametrize("text", ["//evil", "http://evil", "/\\evil", "", "/a\nb", "/ü"])
def test_a_way_back_is_one_of_our_own_or_the_overview(text: str) -> None:
    assert local_address(text) == "/"


def test_a_dead_letter_stream_tells_whose_it_is() -> None:
    assert stream_of("{orders}.dlq") == "orders"
    assert stream_of("{demo}.orders.dlq") == "{demo}.orders"
    assert stream_of("my.dlq") == "my"


def test_nothing_that_a_template_shows_is_markup_or_moves_the_text_about() -> None:
    html = Renderer().page(
        "entry_item.html", "", {"one": view(Entry(EntryId(1, 1), {b"<b>": b"<i>\x1b[31m\n\xe2\x80\xae"}), 0)}
    )

    assert "<b>" not in html
    assert "<i>" not in html
    assert "\x1b" not in html
    assert chr(0x202E) not in html
    assert "\\x1b[31m" in html


def test_a_curve_tells_its_numbers_and_a_single_point_is_none() -> None:
    assert "<svg" not in curve([1.0], "lag")
    assert "<svg" not in curve([None, None, 3], "lag")
    drawn = curve([0, None, 5.0, 10], "lag")
    assert 'aria-label="lag: from 0 to 10 over the last 3 looks, now 10"' in drawn
    assert short("x" * 300, 10) == "xxxxxxxxxx… (300 characters)"


def test_who_follows_slowly_is_told_how_many_passed_by() -> None:
    import asyncio

    follower = Follower(EntryId(0, 0), asyncio.Event())
    follower.give([Shown(EntryId(n, 0), "") for n in range(1, HELD + 51)])
    follower.give([Shown(EntryId(5, 0), "")])

    taken, skipped = follower.take()

    assert (len(taken), skipped) == (HELD, 50)
    assert taken[0].id == EntryId(51, 0)
    assert follower.take() == ([], 0)
