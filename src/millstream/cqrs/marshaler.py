"""Commands and events as messages and back."""

from __future__ import annotations

from typing import Any, Protocol

from pydantic import TypeAdapter, ValidationError

from millstream.cqrs.errors import CannotUnmarshal
from millstream.messaging import Message

NAME = "name"
"""The metadata key under which the class's name travels."""


class Marshaler(Protocol):
    """How commands and events travel. ``name`` decides the topic; ``unmarshal`` raises CannotUnmarshal, which buries
    the message at once: trying again cannot help it."""

    def name(self, kind: type) -> str: ...

    def marshal(self, body: object) -> Message: ...

    def unmarshal(self, message: Message, kind: type) -> Any: ...


class PydanticMarshaler:
    """JSON, validated: pydantic models, dataclasses, TypedDicts, and whatever else pydantic can describe."""

    def name(self, kind: type) -> str:
        return kind.__name__

    def marshal(self, body: object) -> Message:
        kind = type(body)
        payload = _adapter(kind).dump_json(body)
        return Message(payload, {NAME: self.name(kind), "content_type": "application/json"})

    def unmarshal(self, message: Message, kind: type) -> Any:
        try:
            return _adapter(kind).validate_json(message.payload)
        except ValidationError as error:
            # include_input=False: an error travels into logs and dead letters, where a payload may not belong.
            found = error.errors(include_input=False, include_url=False, include_context=False)
            first = "; ".join(f"{'.'.join(map(str, each['loc'])) or 'body'}: {each['msg']}" for each in found[:3])
            raise CannotUnmarshal(self.name(kind), f"{first}{' ...' if len(found) > 3 else ''}") from None


_ADAPTERS: dict[type, TypeAdapter[Any]] = {}
"""As many as the program has commands and events."""


def _adapter(kind: type) -> TypeAdapter[Any]:
    if (adapter := _ADAPTERS.get(kind)) is None:
        adapter = _ADAPTERS[kind] = TypeAdapter(kind)
    return adapter
