"""The default: ``uuid`` and ``payload`` as fields, and each piece of metadata as a field of its own, W3C's
``traceparent`` among them. XRANGE in redis-cli shows all of it; whatever else lies in the stream is read sensibly too.
"""

from __future__ import annotations

from millstream.messaging.codecs.foreign import decode_foreign
from millstream.messaging.message import Message

UUID = b"uuid"
PAYLOAD = b"payload"
ESCAPE = b"meta."
"""Goes before a metadata key that would be mistaken for one of our own fields."""
_OURS = (ESCAPE, b"dlq.", b"replay.")


class FlatCodec:
    name = "flat"

    def encode(self, message: Message) -> dict[bytes, bytes]:
        fields = {UUID: message.uuid.encode("utf-8", "surrogateescape"), PAYLOAD: message.payload}
        for key, value in message.metadata.items():
            name = key.encode("utf-8", "surrogateescape")
            if name in (UUID, PAYLOAD) or name.startswith(_OURS):
                name = ESCAPE + name
            fields[name] = value.encode("utf-8", "surrogateescape")
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
