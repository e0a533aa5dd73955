"""The whole message as one JSON object in one field, for consumers that want a single document."""

from __future__ import annotations

import base64
import binascii
import json
import re
from json.decoder import WHITESPACE, scanstring  # type: ignore[attr-defined]  # there, if not in the stubs
from typing import Any

from millstream.messaging.codecs import check_texts
from millstream.messaging.errors import Undecodable
from millstream.messaging.message import Message

FIELD = b"message"


class JsonCodec:
    """``{"uuid": ..., "metadata": {...}, "payload": "text"}``; a payload that is not UTF-8 travels as
    ``payload_base64`` instead, and comes back byte for byte."""

    name = "json"

    def encode(self, message: Message) -> dict[bytes, bytes]:
        check_texts(message)
        document: dict[str, Any] = {"uuid": message.uuid, "metadata": message.metadata}
        try:
            document["payload"] = message.payload.decode("utf-8")
        except UnicodeDecodeError:
            document["payload_base64"] = base64.b64encode(message.payload).decode("ascii")
        # ASCII only: metadata may hold surrogate escapes, which UTF-8 cannot carry and \udcNN can.
        return {FIELD: json.dumps(document, separators=(",", ":")).encode("ascii")}

    def decode(self, fields: dict[bytes, bytes]) -> Message:
        text = fields.get(FIELD)
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
    if payload is not None:  # a producer that nests its JSON instead of quoting it
        return _as_written(text.decode("utf-8", "surrogatepass"), "payload").encode("utf-8", "surrogatepass")
    raise Undecodable("neither 'payload' nor 'payload_base64' is there")


def _as_written(text: str, wanted: str) -> str:
    """The last member of this name of the object, as it was written: made anew from what Python read, 1.10 would
    become 1.1, and 1e400 no JSON at all. The text was read as JSON before."""
    found, at = "", _after_space(text, 0) + 1
    while text[at := _after_space(text, at)] != "}":
        if text[at] == ",":
            at = _after_space(text, at + 1)
        name, at = scanstring(text, at + 1)
        at = _after_space(text, _after_space(text, at) + 1)  # the colon
        _, end = _READER.raw_decode(text, at)
        if name == wanted:
            found = text[at:end]
        at = end
    return found


def _after_space(text: str, at: int) -> int:
    matched: re.Match[str] | None = WHITESPACE.match(text, at)
    assert matched is not None  # it matches nothing, too
    return matched.end()


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


_READER = json.JSONDecoder()
