"""How entries are displayed: decoded as JSON, text or bytes, and cut if they are long."""

from __future__ import annotations

import json

import pytest

from millstream import open_broker
from millstream.dashboard.entries import (
    MAX_PAYLOAD_BYTES,
    indented,
    matches,
    parse_start,
    read_page,
    search,
    show_payload,
    view,
)
from millstream.dashboard.feed import MAX_QUEUED_ENTRIES, Follower, RenderedEntry
from millstream.dashboard.pages.dead_letters import stream_of
from millstream.dashboard.render import Query, Renderer, address, curve, decode_name, encode_name, local_address, short
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
def test_indented_json_keeps_its_tokens(text: str) -> None:
    output = indented(text)

    assert "".join(output.split()) == "".join(text.split())
    assert json.loads(output) == json.loads(text)


def test_json_is_indented_like_json_dumps() -> None:
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
def test_kind_of_payload_is_detected(body: bytes, kind: str) -> None:
    assert show_payload(body).kind == kind


def test_large_payload_is_cut_and_its_size_shown() -> None:
    huge = Entry(EntryId(1767225600000, 0), {b"payload": b"x" * 100_000_000, b"uuid": b"u"})

    text = view(huge, 1767225601000)

    assert text.size == 100_000_012
    assert len(text.payload.text) == MAX_PAYLOAD_BYTES
    assert text.payload.cut == "The first 16.4 kB of 100.0 MB."
    assert sum(len(field.value) for field in text.fields) < 3_000


def test_search_matches_names_values_encoded_metadata_and_ids() -> None:
    from millstream.messaging import Message
    from millstream.messaging.codecs import codec

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
def test_start_is_an_id_or_a_time(text: str, id: str) -> None:
    assert parse_start(text) == id


@pytest.mark.parametrize("text", ["yesterday", "1-2-3", "-", "99999999999999999999999-0", "0001-01-01x"])
def test_invalid_start_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidArgument, match="such as"):
        parse_start(text)


async def test_page_of_large_entries_ends_early_and_the_next_page_continues() -> None:
    async with open_broker("local://entry-views", max_stream_len=None) as broker:
        ids = [await broker.xadd("big", {"n": str(n), "x": b"x" * 3_000_000}) for n in range(5)]
        result: list[EntryId] = []
        start: str | None = ""
        pages = 0
        while start is not None:
            page = await read_page(broker, "big", start, oldest_first=True)
            result += [entry.id for entry in page.entries]
            start, pages = page.next_id, pages + 1
        assert result == ids
        assert pages > 1
        newest = await read_page(broker, "big", "", oldest_first=False)
        assert newest.entries[0].id == ids[-1]
        await broker.delete_stream("big")


async def test_search_with_many_matches_continues_after_the_last_match() -> None:
    async with open_broker("local://entry-views", max_stream_len=None) as broker:
        await broker.xadd_many("many", [{"n": str(n)} for n in range(130)])
        result: list[Entry] = []
        searched = 0
        start: str | None = ""
        while start is not None:
            part = await search(broker, "many", "n", start, oldest_first=False)
            result += part.entries
            searched += part.searched
            start = part.next_id
        assert [entry.fields[b"n"] for entry in result] == [b"%d" % n for n in reversed(range(130))]
        assert searched == 130
        await broker.delete_stream("many")


@pytest.mark.parametrize("raw", [b"orders", b"{a}.b", b"a b&c=d?#/%25", bytes(range(256)), b"\xc3\xbc\xe2\x80\xae<b>"])
def test_any_name_survives_encoding_in_a_url(raw: bytes) -> None:
    name = raw.decode("utf-8", "surrogateescape")
    transport = address("/stream", [("name", encode_name(name))])

    assert transport.isascii()
    assert Query(transport.partition("?")[2]).name("name") == name
    assert decode_name(encode_name(name)) == name


def test_text_in_a_url_is_encoded_once() -> None:
    transport = address("/dead-letters", [("like", encode_name('order # can\'t be paid: "late" & 100%'))])
    assert transport == "/dead-letters?like=order+%23+can%27t+be+paid:+%22late%22+%26+100%2525"
    assert Query(transport.partition("?")[2]).name("like") == 'order # can\'t be paid: "late" & 100%'


def test_plain_names_stay_readable_in_urls() -> None:
    assert address("/stream", [("name", encode_name("{demo}.orders:1"))]) == "/stream?name={demo}.orders:1"


@pytest.mark.parametrize("text", ["//evil", "http://evil", "/\\evil", "", "/a\nb", "/ü"])
def test_foreign_return_address_is_replaced_by_the_overview(text: str) -> None:
    assert local_address(text) == "/"


def test_name_of_the_stream_is_derived_from_its_dead_letter_stream() -> None:
    assert stream_of("{orders}.dlq") == "orders"
    assert stream_of("{demo}.orders.dlq") == "{demo}.orders"
    assert stream_of("my.dlq") == "my"


def test_templates_escape_markup_and_control_characters() -> None:
    html = Renderer().page(
        "entry_item.html", "", {"entry": view(Entry(EntryId(1, 1), {b"<b>": b"<i>\x1b[31m\n\xe2\x80\xae"}), 0)}
    )

    assert "<b>" not in html
    assert "<i>" not in html
    assert "\x1b" not in html
    assert chr(0x202E) not in html
    assert "\\x1b[31m" in html


def test_chart_label_states_the_range_and_one_point_draws_no_chart() -> None:
    assert "<svg" not in curve([1.0], "lag")
    assert "<svg" not in curve([None, None, 3], "lag")
    drawn = curve([0, None, 5.0, 10], "lag")
    assert 'aria-label="lag: from 0 to 10 over the last 3 readings, now 10"' in drawn
    assert short("x" * 300, 10) == "xxxxxxxxxx… (300 characters)"


def test_slow_follower_receives_the_number_of_dropped_entries() -> None:
    import asyncio

    follower = Follower(EntryId(0, 0), asyncio.Event())
    follower.add([RenderedEntry(EntryId(n, 0), "") for n in range(1, MAX_QUEUED_ENTRIES + 51)])
    follower.add([RenderedEntry(EntryId(5, 0), "")])

    taken, skipped = follower.take()

    assert (len(taken), skipped) == (MAX_QUEUED_ENTRIES, 50)
    assert taken[0].id == EntryId(51, 0)
    assert follower.take() == ([], 0)
