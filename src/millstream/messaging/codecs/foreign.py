"""Decodes entries that other programs wrote: the payload and the metadata of any entry.

Tried in this order: the wire formats that have a field of a known name, the two layouts of a pipeline's redis sink, our
other codecs, Debezium's two forms, Benthos's body, any field ``payload``; and for a plain XADD, all fields as one JSON
object, each of them also as metadata.
"""

from __future__ import annotations

import json

from millstream.messaging.changes import headers_of, sink_layout
from millstream.messaging.errors import Undecodable
from millstream.messaging.message import Message

_UUID_FIELDS = (b"uuid", b"event_id", b"idempotency_key")


def decode_foreign(fields: dict[bytes, bytes]) -> Message:
    if b"_watermill_message_uuid" in fields:
        from millstream.messaging.codecs.watermill import WatermillCodec

        return WatermillCodec().decode(fields)
    if b"_natricine_message_uuid" in fields:
        from millstream.messaging.codecs.watermill import NatricineCodec

        return NatricineCodec().decode(fields)
    if (layout := sink_layout(fields)) is not None:
        return _of_sink(fields, b"event" if layout == "native" else b"value")
    if fields.keys() == {b"key", b"value"}:  # Debezium, extended
        return Message(fields[b"value"], {"key": _text(fields[b"key"])})
    if len(fields) == 1:
        (name, value), *_ = fields.items()
        if name == b"data":  # our raw
            return Message(value)
        if name == b"message" and (ours := _of_our_json(fields)) is not None:
            return ours
        if name.startswith(b"{") and value.startswith(b"{"):  # Debezium, compact: the record's key is the field's name
            return Message(value, {"key": _text(name)})
    for body in (b"payload", b"body", b"df-event"):  # ours without a uuid, Benthos, DeltaForge
        if body in fields:
            return Message(fields[body], _metadata(fields, without=body), _uuid(fields))
    return Message(_as_json(fields), _metadata(fields), _uuid(fields))


def _of_sink(fields: dict[bytes, bytes], document: bytes) -> Message:
    """An entry of a pipeline's redis sink: the document, with the event's id as uuid and the headers as metadata."""
    own = {name: value for name, value in fields.items() if name not in (document, b"id", b"headers")}
    headers = headers_of(fields) if b"headers" in fields else {}
    return Message(fields[document], headers | _metadata(own), _text(fields[b"id"]) or None)


def _of_our_json(fields: dict[bytes, bytes]) -> Message | None:
    """A message of our json codec; None if the field holds something else, such as plain text."""
    from millstream.messaging.codecs.flat import JsonCodec

    try:
        return JsonCodec().decode(fields)
    except Undecodable:
        return None


def _metadata(fields: dict[bytes, bytes], without: bytes | None = None) -> dict[str, str]:
    metadata = {_text(name): _text(value) for name, value in fields.items() if name not in (without, b"uuid")}
    if "df-key" in metadata:
        metadata.setdefault("key", metadata["df-key"])
    return metadata


def _uuid(fields: dict[bytes, bytes]) -> str | None:
    return next((_text(fields[name]) for name in _UUID_FIELDS if fields.get(name)), None)


def _as_json(fields: dict[bytes, bytes]) -> bytes:
    """Values stay text: it is unknown whether ``007`` was meant as a number. Bytes that are not UTF-8 become
    ``\\xNN`` in this view; ``message.fields`` has them as they are."""
    readable = {
        name.decode("utf-8", "backslashreplace"): value.decode("utf-8", "backslashreplace")
        for name, value in fields.items()
    }
    return json.dumps(readable, ensure_ascii=False, separators=(",", ":")).encode()


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")
