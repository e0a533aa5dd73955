"""Entries as people want to see them: decoded by the codec that fits, as JSON, text or bytes, cut where they are long;
and read by the page, or searched by the slice, never more at a time than a server and a browser bear."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from millstream.broker import Broker
from millstream.dashboard.render import time_of
from millstream.errors import InvalidArgument
from millstream.messaging import Undecodable, codec
from millstream.model import Entry, EntryId
from millstream.observe import age, size

PAGE = 50
PAGE_BYTES = 8 << 20
"""A page ends here too, but has one entry at least."""
SHOWN_BYTES = 16 << 10
"""Of one payload; the rest is told, not shown."""
FIELD_BYTES = 2_000
MOST_FIELDS = 50
PREVIEW = 160
SLICE = 5_000
SLICE_BYTES = 32 << 20
FOUND = 50
"""Entries of one slice of a search; it goes on behind the last."""


class Payload(NamedTuple):
    """``kind``: JSON, text or bytes. ``cut`` tells what is not shown."""

    kind: str
    text: str
    size: int
    cut: str = ""


class Field(NamedTuple):
    name: str
    value: str
    size: int


class EntryView(NamedTuple):
    id: EntryId
    age: str
    time: str
    size: int
    codec: str
    payload: Payload
    preview: str
    metadata: Sequence[tuple[str, str]]
    more_metadata: int
    fields: Sequence[Field]
    more_fields: int


_WATERMILL = {b"_watermill_message_uuid": "watermill", b"_natricine_message_uuid": "natricine"}


def view(entry: Entry, now_ms: int) -> EntryView:
    fields = entry.fields
    weight = sum(len(name) + len(value) for name, value in fields.items())
    kind, body, metadata = _decoded(fields, weight)
    payload = show_payload(body)
    shown = [(name[:FIELD_BYTES], value[:FIELD_BYTES]) for name, value in list(metadata.items())[:MOST_FIELDS]]
    raw = [
        Field(_text(name[:FIELD_BYTES]), _text(value[:FIELD_BYTES]), len(value))
        for name, value in list(fields.items())[:MOST_FIELDS]
    ]
    return EntryView(
        entry.id,
        age(now_ms, entry.id),
        time_of(entry.id),
        weight,
        kind,
        payload,
        _preview(payload, body),
        shown,
        max(0, len(metadata) - MOST_FIELDS),
        raw,
        max(0, len(fields) - MOST_FIELDS),
    )


def _preview(payload: Payload, body: bytes) -> str:
    """The beginning on one line; JSON as it was written."""
    text = payload.text if payload.kind != "JSON" else body[: 4 * PREVIEW].decode("utf-8", "ignore")
    return re.sub(r"\s+", " ", text[: 2 * PREVIEW])[:PREVIEW]


def _decoded(fields: Mapping[bytes, bytes], weight: int) -> tuple[str, bytes, dict[str, str]]:
    """The codec's name, the payload, and what is said about it. The default codec reads what others write too."""
    own = {name: value for name, value in fields.items() if not name.startswith((b"replay.", b"dlq."))}
    if weight > PAGE_BYTES:
        # Taken apart and put together, it would be in memory several times: its largest field stands for it.
        return "", max(own.values(), key=len, default=b""), {}
    try:
        message = codec("flat").decode(own)
    except Undecodable:
        return "", b"\n".join(b"%b=%b" % pair for pair in own.items()), {}
    return _codec_name(own), message.payload, message.metadata


def _codec_name(fields: Mapping[bytes, bytes]) -> str:
    for field, name in _WATERMILL.items():
        if field in fields:
            return name
    if b"uuid" in fields and b"payload" in fields:
        return "flat"
    if fields.keys() == {b"message"}:
        return "json"
    if fields.keys() == {b"data"}:
        return "raw"
    return "plain fields"


def show_payload(body: bytes) -> Payload:
    if len(body) <= SHOWN_BYTES:
        try:
            if isinstance(json.loads(body), dict | list):
                return Payload("JSON", indented(body.decode()), len(body))
        except (ValueError, RecursionError):
            pass  # text, or bytes
    part = body[:SHOWN_BYTES]
    cut = f"The first {size(len(part))} of {size(len(body))}." if len(part) < len(body) else ""
    try:
        text = part.decode("utf-8", "strict" if not cut else "ignore")
    except UnicodeDecodeError:
        text = ""
    if body and (not text or _looks_binary(text)):
        part = body[:1024]
        cut = f"The first {size(len(part))} of {size(len(body))}." if len(part) < len(body) else ""
        return Payload("bytes", hex_dump(part), len(body), cut)
    return Payload("text", text, len(body), cut)


_JSON_WORDS = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')


def indented(text: str) -> str:
    """JSON over several lines, word for word as it was written: read and written anew, 1.10 would become 1.1."""
    made: list[str] = []
    depth = 0
    words = _JSON_WORDS.findall(text)
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word in "}]" and made[-1] not in "{[":
            made.append("\n" + "  " * depth)
        made.append(word)
        if word in "{[":
            depth += 1
        if following in ("}", "]"):
            depth -= 1
        if word == ":":
            made.append(" ")
        elif word == "," or (word in "{[" and following not in ("}", "]")):
            made.append("\n" + "  " * depth)
    return "".join(made)


def _looks_binary(text: str) -> bool:
    odd = sum(1 for char in text[:1000] if ord(char) < 32 and char not in "\n\r\t")
    return odd * 10 > len(text[:1000])


def hex_dump(raw: bytes) -> str:
    """Sixteen bytes a line: where, what, and as letters."""
    lines = []
    for at in range(0, len(raw), 16):
        row = raw[at : at + 16]
        letters = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{at:08x}  {row.hex(' '):<47}  {letters}")
    return "\n".join(lines)


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


# --- where to begin ---


def parse_start(text: str) -> str:
    """An id, or a time in UTC: an id to read from. Raises InvalidArgument, with what it may be."""
    text = text.strip()
    if re.fullmatch(r"\d{1,20}(-\d{1,20})?", text):
        return str(EntryId.parse(text if "-" in text else f"{text}-0", argument="from"))
    try:
        moment = datetime.fromisoformat(text.removesuffix(" UTC"))
    except ValueError:
        wanted = "an id such as 1767225600000-0, or a time such as 2026-01-31 12:00 (UTC)"
        raise InvalidArgument("from", text, wanted) from None
    at = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return f"{max(0, int(at.timestamp() * 1000))}-0"


# --- reading by the page ---


class EntryPage(NamedTuple):
    """``next_id``: where the next page begins; None at the end. ``cut``: it ends before its time, and why."""

    entries: list[Entry]
    next_id: str | None
    cut: str = ""


async def read_page(
    broker: Broker, stream: str, start: str, *, oldest_first: bool, most: int = PAGE, until: str = ""
) -> EntryPage:
    """A page of entries, the first of them at ``start`` (empty: the end), none beyond ``until``. Entries may be large:
    one is read, and then as many at a time as fit into the page by what was read so far."""
    found: list[Entry] = []
    weight = 0
    at = start
    while len(found) <= most:
        room = most + 1 - len(found)
        count = 1 if not found else max(1, min(room, int((PAGE_BYTES - weight) / max(1, weight / len(found)))))
        if oldest_first:
            read = await broker.xrange(stream, at or "-", until or "+", count=count)
        else:
            read = await broker.xrevrange(stream, at or "+", until or "-", count=count)
        found += read
        weight += sum(len(name) + len(value) for entry in read for name, value in entry.fields.items())
        if len(read) < count:
            return EntryPage(found, None) if len(found) <= most else EntryPage(found[:most], str(found[most].id))
        if weight > PAGE_BYTES and len(found) <= most:
            cut = f"The page ends here: its entries hold {size(weight)} together."
            after = _beyond(found[-1].id, oldest_first)
            return EntryPage(found, after, cut)
        at = f"({found[-1].id}"
    return EntryPage(found[:most], str(found[most].id))


def _beyond(last: EntryId, oldest_first: bool) -> str | None:
    """The id next to one, in the direction of reading."""
    if oldest_first:
        return f"{last.ms}-{last.seq + 1}"
    if last.seq:
        return f"{last.ms}-{last.seq - 1}"
    return f"{last.ms - 1}-{2**64 - 1}" if last.ms else None


# --- searching ---


class Slice(NamedTuple):
    """``next_id``: where to search on; None when all was searched."""

    entries: list[Entry]
    searched: int
    next_id: str | None


async def search(broker: Broker, stream: str, text: str, start: str, *, oldest_first: bool) -> Slice:
    """Looks for a text, in any case, in names and values; one bounded slice of the stream. Where metadata is packed or
    a payload encoded, it is looked for there as it is shown."""
    wanted = text.lower()
    found: list[Entry] = []
    searched = weight = 0
    at = start
    while searched < SLICE and weight < SLICE_BYTES:
        page = await read_page(broker, stream, at, oldest_first=oldest_first, most=500)
        for n, entry in enumerate(page.entries):
            if len(found) == FOUND:
                return Slice(found, searched + n, str(entry.id))
            if matches(entry, wanted):
                found.append(entry)
            weight += sum(len(name) + len(value) for name, value in entry.fields.items())
        searched += len(page.entries)
        if page.next_id is None:
            return Slice(found, searched, None)
        at = page.next_id
    return Slice(found, searched, at)


def matches(entry: Entry, wanted: str) -> bool:
    """``wanted`` in lower case, in a field's name or value, in metadata, or in the id."""
    if wanted in str(entry.id):
        return True
    for name, value in entry.fields.items():
        if wanted in _text(name).lower() or wanted in _text(value).lower():
            return True
    if entry.fields.keys() & _WATERMILL.keys() or entry.fields.keys() == {b"message"}:
        _, body, metadata = _decoded(entry.fields, 0)
        if wanted in _text(body).lower():
            return True
        return any(wanted in key.lower() or wanted in value.lower() for key, value in metadata.items())
    return False
