"""The wire format of Watermill's Redis Streams publisher (Go)."""

from __future__ import annotations

from millstream.messaging.codecs.packed import decode_packed, encode_packed
from millstream.messaging.message import Message

UUID = b"_watermill_message_uuid"


class WatermillCodec:
    name = "watermill"

    def encode(self, message: Message) -> dict[bytes, bytes]:
        return encode_packed(message, UUID)

    def decode(self, fields: dict[bytes, bytes]) -> Message:
        return decode_packed(fields, UUID)
