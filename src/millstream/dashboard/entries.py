"""Reads, searches and decodes entries for display.

An entry is decoded by the codec that matches it, shown as JSON, text or bytes, and cut if it is long. Reading is paged
and searching is sliced, so that one request never loads more than the limits below.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from millstream.broker import Broker
from millstream.dashboard.render import time_of
from millstream.errors import InvalidArgument
from millstream.messaging.changes import sink_layout
from millstream.messaging.codecs import codec
from millstream.messaging.errors import Undecodable
from millstream.model import Entry, EntryId
from millstream.observe.format import age, size

ENTRIES_PER_PAGE = 50
MAX_PAGE_BYTES = 8 << 20
"""A page also ends at this size, but always has at least one entry."""
MAX_PAYLOAD_BYTES = 16 << 10
"""Of one payload; the page states how much was cut."""
MAX_FIELD_BYTES = 2_000
MAX_FIELDS = 50
MAX_PREVIEW_LENGTH = 160
MAX_SLICE_ENTRIES = 5_000
MAX_SLICE_BYTES = 32 << 20
MAX_MATCHES = 50
"""Of one slice of a search; the next slice continues after the last match."""


class Payload(NamedTuple):
    """A payload as text. ``kind``: JSON, text or bytes. ``cut`` states how much is shown; empty if all of it."""

    kind: str
    text: str
    size: int
    cut: str = ""


class Field(NamedTuple):
    name: str
    value: str
    size: int


class EntryView(NamedTuple):
    """An entry as the templates show it."""

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
    cut = [(name[:MAX_FIELD_BYTES], value[:MAX_FIELD_BYTES]) for name, value in list(metadata.items())[:MAX_FIELDS]]
    raw = [
        Field(_text(name[:MAX_FIELD_BYTES]), _text(value[:MAX_FIELD_BYTES]), len(value))
        for name, value in list(fields.items())[:MAX_FIELDS]
    ]
    return EntryView(
        entry.id,
        age(now_ms, entry.id),
        time_of(entry.id),
        weight,
        kind,
        payload,
        _preview(payload, body),
        cut,
        max(0, len(metadata) - MAX_FIELDS),
        raw,
        max(0, len(fields) - MAX_FIELDS),
    )


def _preview(payload: Payload, body: bytes) -> str:
    """The beginning of the payload on one line; JSON is not reformatted."""
    text = payload.text if payload.kind != "JSON" else body[: 4 * MAX_PREVIEW_LENGTH].decode("utf-8", "ignore")
    return re.sub(r"\s+", " ", text[: 2 * MAX_PREVIEW_LENGTH])[:MAX_PREVIEW_LENGTH]


def _decoded(fields: Mapping[bytes, bytes], weight: int) -> tuple[str, bytes, dict[str, str]]:
    """Return the codec's name, the payload and the metadata. The default codec also reads the layouts of others."""
    own = {name: value for name, value in fields.items() if not name.startswith((b"replay.", b"dlq."))}
    if weight > MAX_PAGE_BYTES:
        # Decoding would copy the entry several times, so only its largest field is shown.
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
    if sink_layout(fields) is not None:
        return "an event of a pipeline"
    return "plain fields"


def show_payload(body: bytes) -> Payload:
    if len(body) <= MAX_PAYLOAD_BYTES:
        try:
            if isinstance(json.loads(body), dict | list):
                return Payload("JSON", indented(body.decode()), len(body))
        except (ValueError, RecursionError):
            pass  # not JSON: shown as text or bytes
    part = body[:MAX_PAYLOAD_BYTES]
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


_JSON_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')


def indented(text: str) -> str:
    """Indent JSON without changing its tokens: parsing and serializing it would turn 1.10 into 1.1."""
    parts: list[str] = []
    depth = 0
    symbols = _JSON_TOKENS.findall(text)
    for symbol, following in zip(symbols, [*symbols[1:], ""], strict=True):
        if symbol in "}]" and parts[-1] not in "{[":
            parts.append("\n" + "  " * depth)
        parts.append(symbol)
        if symbol in "{[":
            depth += 1
        if following in ("}", "]"):
            depth -= 1
        if symbol == ":":
            parts.append(" ")
        elif symbol == "," or (symbol in "{[" and following not in ("}", "]")):
            parts.append("\n" + "  " * depth)
    return "".join(parts)


def _looks_binary(text: str) -> bool:
    control_chars = sum(1 for char in text[:1000] if ord(char) < 32 and char not in "\n\r\t")
    return control_chars * 10 > len(text[:1000])


def hex_dump(raw: bytes) -> str:
    """Format bytes as lines of offset, sixteen bytes in hexadecimal, and the same bytes as ASCII."""
    lines = []
    for at in range(0, len(raw), 16):
        row = raw[at : at + 16]
        letters = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{at:08x}  {row.hex(' '):<47}  {letters}")
    return "\n".join(lines)


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


# --- start position ---


def parse_start(text: str) -> str:
    """Convert an id, or a time in UTC, to the id to read from. Raises InvalidArgument for anything else."""
    text = text.strip()
    if re.fullmatch(r"\d{1,20}(-\d{1,20})?", text):
        return str(EntryId.parse(text if "-" in text else f"{text}-0", argument="from"))
    try:
        moment = datetime.fromisoformat(text.removesuffix(" UTC"))
    except ValueError:
        expected = "an id such as 1767225600000-0, or a time such as 2026-01-31 12:00 (UTC)"
        raise InvalidArgument("from", text, expected) from None
    at = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return f"{max(0, int(at.timestamp() * 1000))}-0"


# --- pages ---


class EntryPage(NamedTuple):
    """A page of entries. ``next_id``: start of the next page; None at the end. ``cut``: why the page ends early."""

    entries: list[Entry]
    next_id: str | None
    cut: str = ""


async def read_page(
    broker: Broker, stream: str, start: str, *, oldest_first: bool, limit: int = ENTRIES_PER_PAGE, until: str = ""
) -> EntryPage:
    """Read up to ``limit`` entries from ``start`` (empty: the first or last entry) to ``until``.

    Entries may be large. So the first read asks for one entry, and each further read for as many as fit into the page
    by their average size so far.
    """
    entries: list[Entry] = []
    page_bytes = 0
    at = start
    while len(entries) <= limit:
        missing = limit + 1 - len(entries)  # one more than the page shows: its id is the start of the next page
        average = max(1, page_bytes / len(entries)) if entries else 1
        count = max(1, min(missing, int((MAX_PAGE_BYTES - page_bytes) / average))) if entries else 1
        if oldest_first:
            batch = await broker.xrange(stream, at or "-", until or "+", count=count)
        else:
            batch = await broker.xrevrange(stream, at or "+", until or "-", count=count)
        entries += batch
        page_bytes += sum(len(name) + len(value) for entry in batch for name, value in entry.fields.items())
        if len(batch) < count and len(entries) <= limit:
            return EntryPage(entries, None)
        if len(batch) < count:
            break
        if page_bytes > MAX_PAGE_BYTES and len(entries) <= limit:
            cut = f"The page ends here because its entries have {size(page_bytes)} in total."
            return EntryPage(entries, _next_id(entries[-1].id, oldest_first), cut)
        at = f"({entries[-1].id}"
    return EntryPage(entries[:limit], str(entries[limit].id))


def _next_id(last: EntryId, oldest_first: bool) -> str | None:
    """The id that follows ``last`` in the direction of reading; None if there is none."""
    if oldest_first:
        return f"{last.ms}-{last.seq + 1}"
    if last.seq:
        return f"{last.ms}-{last.seq - 1}"
    return f"{last.ms - 1}-{2**64 - 1}" if last.ms else None


# --- search ---


class Slice(NamedTuple):
    """One slice of a search. ``next_id``: start of the next slice; None if everything was searched."""

    entries: list[Entry]
    searched: int
    next_id: str | None


async def search(broker: Broker, stream: str, text: str, start: str, *, oldest_first: bool) -> Slice:
    """Search one bounded slice of a stream for a text in names and values, ignoring case.

    Encoded metadata and payloads are searched in their decoded form, as they are shown.
    """
    text = text.lower()
    matching: list[Entry] = []
    searched = slice_bytes = 0
    at = start
    while searched < MAX_SLICE_ENTRIES and slice_bytes < MAX_SLICE_BYTES:
        page = await read_page(broker, stream, at, oldest_first=oldest_first, limit=500)
        for n, entry in enumerate(page.entries):
            if len(matching) == MAX_MATCHES:
                return Slice(matching, searched + n, str(entry.id))
            if matches(entry, text):
                matching.append(entry)
            slice_bytes += sum(len(name) + len(value) for name, value in entry.fields.items())
        searched += len(page.entries)
        if page.next_id is None:
            return Slice(matching, searched, None)
        at = page.next_id
    return Slice(matching, searched, at)


def matches(entry: Entry, text: str) -> bool:
    """Whether the id, a field's name or value, or the metadata contains ``text``, which must be in lower case."""
    if text in str(entry.id):
        return True
    for name, value in entry.fields.items():
        if text in _text(name).lower() or text in _text(value).lower():
            return True
    if entry.fields.keys() & _WATERMILL.keys() or entry.fields.keys() == {b"message"}:
        _, body, metadata = _decoded(entry.fields, 0)
        if text in _text(body).lower():
            return True
        return any(text in key.lower() or text in value.lower() for key, value in metadata.items())
    return False
