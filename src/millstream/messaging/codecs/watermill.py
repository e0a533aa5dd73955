"""The wire formats of Watermill's Redis Streams publisher (Go) and of natricine, its relative in Python: a uuid, a
payload, metadata as msgpack.

msgpack is untrusted input: only a flat map of short texts is read, and limits are checked before memory is allocated.
"""

from __future__ import annotations

from typing import Any

import msgpack

from millstream.errors import InvalidArgument
from millstream.messaging.codecs import check_texts, not_text
from millstream.messaging.errors import Undecodable
from millstream.messaging.message import Message

METADATA = b"metadata"
PAYLOAD = b"payload"
MAX_ENTRIES = 1024
MAX_TEXT = 1 << 20


def encode_packed(message: Message, uuid_field: bytes) -> dict[bytes, bytes]:
    """Raises InvalidArgument beyond the limits that apply to reading: metadata that cannot be read is not written."""
    check_texts(message)
    if len(message.metadata) > MAX_ENTRIES:
        raise InvalidArgument("metadata", f"{len(message.metadata)} entries", f"at most {MAX_ENTRIES}")
    try:
        if any(len(text) > MAX_TEXT // 4 for pair in message.metadata.items() for text in pair):
            longest = max(len(text.encode("utf-8", "surrogateescape")) for p in message.metadata.items() for text in p)
            if longest > MAX_TEXT:
                raise InvalidArgument("metadata", f"a text of {longest} bytes", f"texts of at most {MAX_TEXT} bytes")
        return {
            uuid_field: message.uuid.encode("utf-8", "surrogateescape"),
            METADATA: msgpack.packb(message.metadata, unicode_errors="surrogateescape"),
            PAYLOAD: message.payload,
        }
    except UnicodeEncodeError as error:
        raise not_text(message, error) from error


def decode_packed(fields: dict[bytes, bytes], uuid_field: bytes) -> Message:
    uuid = fields.get(uuid_field)
    if uuid is None:
        raise Undecodable(f"the entry has no field {uuid_field.decode()!r}")
    payload = fields.get(PAYLOAD)
    if payload is None:
        raise Undecodable("the entry has no field 'payload'")
    return Message(payload, unpack_metadata(fields.get(METADATA, b"")), uuid.decode("utf-8", "surrogateescape"))


def unpack_metadata(raw: bytes) -> dict[str, str]:
    """Nothing, nil and an empty map mean no metadata. Numbers become text; nested values are Undecodable."""
    if not raw:
        return {}
    try:
        unpacked = msgpack.unpackb(
            raw,
            unicode_errors="surrogateescape",
            max_str_len=MAX_TEXT,
            max_bin_len=MAX_TEXT,
            max_map_len=MAX_ENTRIES,
            max_array_len=0,
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException, RecursionError, TypeError) as error:
        raise Undecodable(f"field 'metadata' is not msgpack within the limits: {error}") from None
    if unpacked is None:
        return {}
    if not isinstance(unpacked, dict):
        raise Undecodable("field 'metadata' is not a msgpack map")
    return {_as_text(key): _as_text(value) for key, value in unpacked.items()}


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    raise Undecodable(f"field 'metadata' holds a {type(value).__name__} where a text belongs")


WATERMILL_UUID = b"_watermill_message_uuid"


class WatermillCodec:
    name = "watermill"

    def encode(self, message: Message) -> dict[bytes, bytes]:
        return encode_packed(message, WATERMILL_UUID)

    def decode(self, fields: dict[bytes, bytes]) -> Message:
        return decode_packed(fields, WATERMILL_UUID)


NATRICINE_UUID = b"_natricine_message_uuid"


class NatricineCodec:
    name = "natricine"

    def encode(self, message: Message) -> dict[bytes, bytes]:
        return encode_packed(message, NATRICINE_UUID)

    def decode(self, fields: dict[bytes, bytes]) -> Message:
        return decode_packed(fields, NATRICINE_UUID)
