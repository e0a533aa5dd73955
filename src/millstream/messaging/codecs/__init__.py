"""The codecs, selected by name. Standard Redis tools can read the entries of each codec. A codec that cannot decode an
entry raises Undecodable, and the subscriber dead-letters the entry with that reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from millstream.errors import InvalidArgument, did_you_mean

if TYPE_CHECKING:
    from millstream.messaging.message import Message


class Codec(Protocol):
    """Converts between messages and the fields of stream entries."""

    name: str

    def encode(self, message: Message) -> dict[bytes, bytes]:
        """Returns the entry's fields. Any payload and any metadata can be encoded, including binary zeros."""

    def decode(self, fields: dict[bytes, bytes]) -> Message:
        """Returns the message. Raises only Undecodable, for any fields. Called for every entry, so it must be fast."""


def check_texts(message: Message) -> None:
    """Raises InvalidArgument for a uuid or metadata that is not text: it could not be decoded again."""
    if not isinstance(message.uuid, str):
        raise InvalidArgument("uuid", message.uuid, "a text")
    for key, value in message.metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise InvalidArgument("metadata", {key: value}, "only texts, such as {'attempt': '3'}")


def not_text(message: Message, error: Exception) -> InvalidArgument:
    """The error for a message that could not be encoded: a value is not text, or is text without a UTF-8 encoding."""
    try:
        check_texts(message)
    except InvalidArgument as known:
        return known
    return InvalidArgument("metadata", message.metadata, f"texts that UTF-8 can carry ({error})")


def _flat() -> Codec:
    from millstream.messaging.codecs.flat import FlatCodec

    return FlatCodec()


def _json() -> Codec:
    from millstream.messaging.codecs.flat import JsonCodec

    return JsonCodec()


def _raw() -> Codec:
    from millstream.messaging.codecs.flat import RawCodec

    return RawCodec()


def _watermill() -> Codec:
    from millstream.messaging.codecs.watermill import WatermillCodec

    return WatermillCodec()


def _natricine() -> Codec:
    from millstream.messaging.codecs.watermill import NatricineCodec

    return NatricineCodec()


_MAKERS: dict[str, Callable[[], Codec]] = {
    "flat": _flat,
    "json": _json,
    "natricine": _natricine,
    "raw": _raw,
    "watermill": _watermill,
}


def codec_names() -> list[str]:
    return sorted(_MAKERS)


def codec(name: str | Codec) -> Codec:
    """The codec of that name; a custom codec is returned unchanged. Raises InvalidArgument, which lists the names."""
    if not isinstance(name, str):
        if not (callable(getattr(name, "encode", None)) and callable(getattr(name, "decode", None))):
            raise InvalidArgument("codec", name, f"{', '.join(codec_names())}, or an object with encode and decode")
        return name
    maker = _MAKERS.get(name)
    if maker is None:
        raise InvalidArgument("codec", name, ", ".join(codec_names()) + did_you_mean(name, codec_names()))
    return maker()
