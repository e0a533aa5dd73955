"""Formats that plain tools show as they are. ``flat``, the default: ``uuid`` and ``payload`` as fields, and each piece
of metadata as a field of its own, W3C's ``traceparent`` among them; whatever else lies in the stream is read too.
``raw``: the payload alone, in a field called ``data``; metadata and uuid do not travel, that is what raw means.
"""

from __future__ import annotations

from millstream.messaging.codecs import not_text
from millstream.messaging.codecs.foreign import decode_foreign
from millstream.messaging.errors import Undecodable
from millstream.messaging.message import Message

UUID = b"uuid"
PAYLOAD = b"payload"
ESCAPE = b"meta."
"""Goes before a metadata key that would be mistaken for one of our own fields."""
_OURS = (ESCAPE, b"dlq.", b"replay.")


class FlatCodec:
    name = "flat"

    def encode(self, message: Message) -> dict[bytes, bytes]:
        try:
            fields = {UUID: message.uuid.encode("utf-8", "surrogateescape"), PAYLOAD: message.payload}
            for key, value in message.metadata.items():
                name = key.encode("utf-8", "surrogateescape")
                if name in (UUID, PAYLOAD) or name.startswith(_OURS):
                    name = ESCAPE + name
                fields[name] = value.encode("utf-8", "surrogateescape")
        except (AttributeError, UnicodeEncodeError) as error:
            raise not_text(message, error) from error
        return fields

    def decode(self, fields: dict[bytes, bytes]) -> Message:
        uuid = fields.get(UUID)
        payload = fields.get(PAYLOAD)
        if uuid is None or payload is None:
            return decode_foreign(fields)
        metadata: dict[str, str] = {}
        if len(fields) > 2:
            for name, value in fields.items():
                if name not in (UUID, PAYLOAD):
                    key = name.removeprefix(ESCAPE).decode("utf-8", "surrogateescape")
                    metadata[key] = value.decode("utf-8", "surrogateescape")
        return Message(payload, metadata, uuid.decode("utf-8", "surrogateescape"))


FIELD = b"data"


class RawCodec:
    """Reading, it also takes an entry's only field, whatever its name; other fields beside ``data`` become metadata."""

    name = "raw"

    def encode(self, message: Message) -> dict[bytes, bytes]:
        return {FIELD: message.payload}

    def decode(self, fields: dict[bytes, bytes]) -> Message:
        payload = fields.get(FIELD)
        if payload is not None:
            if len(fields) == 1:
                return Message(payload)
            others = {_text(name): _text(value) for name, value in fields.items() if name != FIELD}
            return Message(payload, others)
        if len(fields) == 1:
            return Message(next(iter(fields.values())))
        raise Undecodable("the entry has no field 'data', and more than one other")


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")
