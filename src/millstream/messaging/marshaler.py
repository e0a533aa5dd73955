"""Commands and events as messages and back."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Protocol

from millstream.messaging.errors import CannotUnmarshal
from millstream.messaging.failure import text_of
from millstream.messaging.message import Message

if TYPE_CHECKING:
    from pydantic import TypeAdapter

BODY_NAME = "name"
"""The metadata key under which the class's name travels."""


class Marshaler(Protocol):
    """How commands and events travel. ``name`` decides the topic; ``unmarshal`` raises CannotUnmarshal, which buries
    the message at once: trying again cannot help it."""

    def name(self, kind: type) -> str: ...

    def marshal(self, body: object) -> Message: ...

    def unmarshal(self, message: Message, kind: type) -> Any: ...


def is_body(value: object) -> bool:
    """A pydantic model or a dataclass: what a handler may return instead of a message."""
    return hasattr(type(value), "__pydantic_validator__") or hasattr(type(value), "__dataclass_fields__")


def check_body(marshaler: Marshaler, kind: type) -> str | None:
    """Why nothing of this kind can ever be unmarshaled, where that is known before the first message."""
    if not isinstance(marshaler, PydanticMarshaler):
        return None
    try:
        _adapter(kind)
    except Exception as error:  # pydantic's own, which differ between its versions
        return text_of(error).splitlines()[0]
    return None


class PydanticMarshaler:
    """JSON, validated: pydantic models, dataclasses, TypedDicts, and whatever else pydantic can describe.

    What is marshaled can be unmarshaled: fields travel under their names and are read by name or alias, what is
    computed does not travel, and a float that JSON has no number for travels as "NaN", "Infinity" or "-Infinity".
    """

    def name(self, kind: type) -> str:
        return kind.__name__

    def marshal(self, body: object) -> Message:
        kind = type(body)
        adapter = _adapter(kind)
        payload = adapter.dump_json(body, by_alias=False, round_trip=True)
        if b"null" in payload:  # perhaps a NaN, of which pydantic makes null, which is no float when it comes back
            plain = adapter.dump_python(body, mode="json", by_alias=False, round_trip=True)
            if (told := _special_floats_as_text(plain)) is not plain:
                payload = json.dumps(told, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
        return Message(payload, {BODY_NAME: self.name(kind), "content_type": "application/json"})

    def unmarshal(self, message: Message, kind: type) -> Any:
        try:
            return _adapter(kind).validate_json(message.payload, by_alias=True, by_name=True)
        except ValueError as error:
            if not hasattr(error, "errors"):  # not pydantic's, but a stranger's in a validator of the user's
                raise
            # include_input=False: an error travels into logs and dead letters, where a payload may not belong.
            found = error.errors(include_input=False, include_url=False, include_context=False)
            first = "; ".join(f"{'.'.join(map(str, each['loc'])) or 'body'}: {each['msg']}" for each in found[:3])
            raise CannotUnmarshal(self.name(kind), f"{first}{' ...' if len(found) > 3 else ''}") from None


def _special_floats_as_text(value: Any) -> Any:
    """The same value where it holds no special float; else one with texts in their places."""
    if isinstance(value, float):
        return value if math.isfinite(value) else "NaN" if math.isnan(value) else f"{'-' if value < 0 else ''}Infinity"
    if isinstance(value, dict):
        told = {key: _special_floats_as_text(each) for key, each in value.items()}
        return told if any(told[key] is not each for key, each in value.items()) else value
    if isinstance(value, list):
        listed = [_special_floats_as_text(each) for each in value]
        return listed if any(new is not old for new, old in zip(listed, value, strict=True)) else value
    return value


_ADAPTERS: dict[type, TypeAdapter[Any]] = {}
"""As many as the program has commands and events."""


def _adapter(kind: type) -> TypeAdapter[Any]:
    if (adapter := _ADAPTERS.get(kind)) is None:
        from pydantic import TypeAdapter  # not loaded by those whose handlers take messages

        adapter = _ADAPTERS[kind] = TypeAdapter(kind)
    return adapter
