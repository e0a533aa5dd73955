"""Converts commands and events to messages and back."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Protocol

from millstream.messaging.changes import ChangeEvent, NotAChange, read_change, read_row, row_type, type_name
from millstream.messaging.errors import CannotUnmarshal
from millstream.messaging.failure import text_of
from millstream.messaging.message import Message

if TYPE_CHECKING:
    from pydantic import TypeAdapter

BODY_NAME = "name"
"""The metadata key of the class's name."""


class Marshaler(Protocol):
    """The format of commands and events in messages. ``name`` decides the topic. ``unmarshal`` raises CannotUnmarshal,
    which dead-letters the message at once, because a retry cannot succeed. ``kind`` is the annotation of a handler: a
    class, or an alias such as ``ChangeEvent[Order]``."""

    def name(self, kind: type) -> str: ...

    def marshal(self, body: object) -> Message: ...

    def unmarshal(self, message: Message, kind: type) -> Any: ...


def is_body(value: object) -> bool:
    """Whether it is a pydantic model or a dataclass, which a handler may return instead of a message."""
    return hasattr(type(value), "__pydantic_validator__") or hasattr(type(value), "__dataclass_fields__")


def check_body(marshaler: Marshaler, kind: type) -> str | None:
    """The reason why no message can be unmarshaled to this kind, if that is known at registration."""
    if not isinstance(marshaler, PydanticMarshaler):
        return None
    try:
        _adapter(row_type(kind) or kind)
    except Exception as error:  # pydantic's own error types, which differ between its versions
        return text_of(error).splitlines()[0]
    return None


class PydanticMarshaler:
    """Validated JSON: pydantic models, dataclasses, TypedDicts, and every other type that pydantic supports.

    A marshaled body can be unmarshaled: fields are written under their names and read by name or alias, computed fields
    are not written, and floats that JSON does not have are written as "NaN", "Infinity" or "-Infinity".

    If the message is an entry of a pipeline's redis sink, a handler receives the row after the change; a handler that
    is annotated with ``ChangeEvent[Order]`` receives the whole change.
    """

    def name(self, kind: type) -> str:
        """The class's name. ``ChangeEvent[Order]`` has the name of its row type, because both use the same topic."""
        return type_name(kind if kind is ChangeEvent else row_type(kind) or kind)

    def marshal(self, body: object) -> Message:
        kind = type(body)
        adapter = _adapter(kind)
        payload = adapter.dump_json(body, by_alias=False, round_trip=True)
        if b"null" in payload:  # perhaps a NaN: pydantic writes it as null, which cannot be read back as a float
            plain = adapter.dump_python(body, mode="json", by_alias=False, round_trip=True)
            if (converted := _special_floats_as_text(plain)) is not plain:
                payload = json.dumps(converted, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
        return Message(payload, {BODY_NAME: self.name(kind), "content_type": "application/json"})

    def unmarshal(self, message: Message, kind: type) -> Any:
        name, row = type_name(kind), row_type(kind)
        try:
            if row is not None:
                return _change_event(message, row, name)
            text = read_row(message, name)
        except NotAChange as error:
            raise CannotUnmarshal(name, str(error), error.advice) from None
        return _validated(kind, text, name, "" if text is message.payload else "after")


def _change_event(message: Message, row: Any, name: str) -> ChangeEvent[Any]:
    """Raises NotAChange and CannotUnmarshal."""
    change = read_change(message)
    key = dict(change.key)
    before = after = None
    if change.before is not None:
        if change.op in ("u", "d") and _is_incomplete(row, change.before):
            key = key or json.loads(change.before)
        else:
            before = _validated(row, change.before, name, "before")
    if change.after is not None:
        after = _validated(row, change.after, name, "after")
    return ChangeEvent(change.op, before, after, change.source, key, change.ts_ms, change.id)


def _is_incomplete(kind: Any, text: str) -> bool:
    """Whether a row lacks columns and its other columns are valid: most databases log only the key of an old row."""
    try:
        _adapter(kind).validate_json(text, by_alias=True, by_name=True)
    except ValueError as error:
        errors: list[dict[str, Any]] = getattr(error, "errors", list)()
        return bool(errors) and all(problem["type"] == "missing" and len(problem["loc"]) == 1 for problem in errors)
    return False


def _validated(kind: Any, text: str | bytes, name: str, place: str) -> Any:
    """``place`` says which part of the message the text is. Raises CannotUnmarshal."""
    try:
        return _adapter(kind).validate_json(text, by_alias=True, by_name=True)
    except ValueError as error:
        if not hasattr(error, "errors"):  # not an error of pydantic, but of a validator of the user
            raise
        # include_input=False: errors are written to logs and dead letters, which may not be allowed to have payloads.
        problems = error.errors(include_input=False, include_url=False, include_context=False)
        texts = (
            f"{'.'.join(filter(None, (place, *map(str, problem['loc'])))) or 'body'}: {problem['msg']}"
            for problem in problems
        )
        first = "; ".join(list(texts)[:3])
        raise CannotUnmarshal(name, f"{first}{' ...' if len(problems) > 3 else ''}") from None


def _special_floats_as_text(value: Any) -> Any:
    """The value, with special floats replaced by texts."""
    if isinstance(value, float):
        return value if math.isfinite(value) else "NaN" if math.isnan(value) else f"{'-' if value < 0 else ''}Infinity"
    if isinstance(value, dict):
        converted = {key: _special_floats_as_text(item) for key, item in value.items()}
        return converted if any(converted[key] is not item for key, item in value.items()) else value
    if isinstance(value, list):
        listed = [_special_floats_as_text(item) for item in value]
        return listed if any(new is not old for new, old in zip(listed, value, strict=True)) else value
    return value


_ADAPTERS: dict[type, TypeAdapter[Any]] = {}
"""One entry for each command and event of the program."""


def _adapter(kind: type) -> TypeAdapter[Any]:
    if (adapter := _ADAPTERS.get(kind)) is None:
        from pydantic import TypeAdapter  # not imported by programs whose handlers take messages

        adapter = _ADAPTERS[kind] = TypeAdapter(kind)
    return adapter
