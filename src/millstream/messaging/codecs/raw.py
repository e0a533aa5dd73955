"""The payload alone, in a field called ``data``. Metadata and uuid do not travel: that is what raw means."""

from __future__ import annotations

from millstream.messaging.errors import Undecodable
from millstream.messaging.message import Message

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
