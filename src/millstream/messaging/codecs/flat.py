"""Formats that plain Redis tools can show. ``flat``, the default: ``uuid``, ``payload`` and each piece of metadata are
fields of the entry, including W3C's ``traceparent``; it also reads the entries of all other codecs and producers.
``raw``: only the payload, in the field ``data``; metadata and uuid are not written. ``json``: the whole message as one
JSON object in one field, for consumers that expect a single document.
"""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any

from millstream.messaging.codecs import check_texts, not_text
from millstream.messaging.codecs.foreign import decode_foreign
from millstream.messaging.errors import Undecodable
from millstream.messaging.json_members import json_members
from millstream.messaging.message import Message

UUID = b"uuid"
PAYLOAD = b"payload"
ESCAPE = b"meta."
"""The prefix of a metadata key that would be mistaken for one of our own fields."""
_OURS = (ESCAPE, b"dlq.", b"replay.")
JSON_FIELD = b"message"


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
    """Also reads an entry's only field, whatever its name; other fields next to ``data`` become metadata."""

    name = "raw"

    def encode(self, message: Message) -> dict[bytes, bytes]:
        return {FIELD: message.payload}

    def decode(self, fields: dict[bytes, bytes]) -> Message:
        payload = fields.get(FIELD)
        if payload is not None:
            if len(fields) == 1:
                return Message(payload)
            metadata = {_text(name): _text(value) for name, value in fields.items() if name != FIELD}
            return Message(payload, metadata)
        if len(fields) == 1:
            return Message(next(iter(fields.values())))
        raise Undecodable("the entry has no field 'data', and more than one other")


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


class JsonCodec:
    """``{"uuid": ..., "metadata": {...}, "payload": "text"}``; a payload that is not UTF-8 is written as
    ``payload_base64`` instead, and read back byte for byte."""

    name = "json"

    def encode(self, message: Message) -> dict[bytes, bytes]:
        check_texts(message)
        document: dict[str, Any] = {"uuid": message.uuid, "metadata": message.metadata}
        try:
            document["payload"] = message.payload.decode("utf-8")
        except UnicodeDecodeError:
            document["payload_base64"] = base64.b64encode(message.payload).decode("ascii")
        # ASCII only: metadata may hold surrogate escapes, which UTF-8 cannot carry and \udcNN can.
        return {JSON_FIELD: json.dumps(document, separators=(",", ":")).encode("ascii")}

    def decode(self, fields: dict[bytes, bytes]) -> Message:
        text = fields.get(JSON_FIELD)
        if text is None:
            raise Undecodable("the entry has no field 'message'")
        try:
            document = json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            raise Undecodable(f"field 'message' is not JSON: {error}") from None
        if not isinstance(document, dict):
            raise Undecodable("field 'message' is not a JSON object")
        uuid = document.get("uuid")
        metadata = document.get("metadata") or {}
        if uuid is not None and not isinstance(uuid, str):
            raise Undecodable("'uuid' is not a text")
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise Undecodable("'metadata' is not an object of texts")
        return Message(_payload(document, text), metadata, uuid)


def _payload(document: dict[str, Any], text: bytes) -> bytes:
    payload, encoded = document.get("payload"), document.get("payload_base64")
    if isinstance(encoded, str):
        try:
            return base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError):
            raise Undecodable("'payload_base64' is not base64") from None
    if isinstance(payload, str):
        return payload.encode("utf-8", "surrogatepass")
    if payload is not None:  # a producer that nests its JSON instead of quoting it. As written: 1.10 keeps its digits
        return json_members(text.decode("utf-8", "surrogatepass"))["payload"].encode("utf-8", "surrogatepass")
    raise Undecodable("neither 'payload' nor 'payload_base64' is there")


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
