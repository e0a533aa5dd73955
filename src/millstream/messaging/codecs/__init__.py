"""The codecs, chosen by name. Each is readable by plain tools; none of them ever drops an entry that it cannot read:
it raises Undecodable, and the subscriber buries the entry with that reason.
"""

from __future__ import annotations

from collections.abc import Callable

from millstream.errors import InvalidArgument
from millstream.messaging.codec import Codec

__all__ = ["codec", "codec_names"]


def _flat() -> Codec:
    from millstream.messaging.codecs.flat import FlatCodec

    return FlatCodec()


def _json() -> Codec:
    from millstream.messaging.codecs.json import JsonCodec

    return JsonCodec()


def _raw() -> Codec:
    from millstream.messaging.codecs.raw import RawCodec

    return RawCodec()


def _watermill() -> Codec:
    from millstream.messaging.codecs.watermill import WatermillCodec

    return WatermillCodec()


def _natricine() -> Codec:
    from millstream.messaging.codecs.natricine import NatricineCodec

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
    """The codec of that name; a codec of the user's own passes through. Another name is an InvalidArgument that lists
    what is allowed."""
    if not isinstance(name, str):
        if not (callable(getattr(name, "encode", None)) and callable(getattr(name, "decode", None))):
            raise InvalidArgument("codec", name, f"{', '.join(codec_names())}, or an object with encode and decode")
        return name
    maker = _MAKERS.get(name)
    if maker is None:
        raise InvalidArgument("codec", name, ", ".join(codec_names()))
    return maker()
