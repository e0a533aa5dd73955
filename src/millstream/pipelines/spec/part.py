"""What every part of a spec is built from: closed models, durations, sizes, names, templates."""

from __future__ import annotations

import hashlib
import re
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    SecretStr,
    SerializationInfo,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from millstream.pipelines.templates import Template, TemplateError

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|milliseconds?|s|seconds?|m|min|minutes?|h|hours?|d|days?)?")
_UNITS = {"ms": 1, "mi": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_SIZE = re.compile(r"(\d+)\s*(B|KB|KiB|MB|MiB|GB|GiB)?", re.IGNORECASE)
_SIZES = {"": 1, "b": 1, "kb": 10**3, "kib": 2**10, "mb": 10**6, "mib": 2**20, "gb": 10**9, "gib": 2**30}


class Part(BaseModel):
    """A closed, frozen model: a field that it does not know is an error, never ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def duration_ms(value: Any) -> Any:
    """``10 minutes``, ``5s``, ``100ms``; a bare number is milliseconds."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise PydanticCustomError("duration", "write a duration such as 500ms, 5s, 10 minutes, 7 days")
    match = _DURATION.fullmatch(str(value).strip())
    if match is None:
        raise PydanticCustomError("duration", "write a duration such as 500ms, 5s, 10 minutes, 7 days")
    number, unit = match.groups()
    unit = unit or "ms"
    factor = 1 if unit.startswith("mil") or unit == "ms" else _UNITS[unit[0]]
    return int(float(number) * factor)


def size_bytes(value: Any) -> Any:
    match = _SIZE.fullmatch(str(value).strip()) if isinstance(value, int | str) and value is not True else None
    if match is None:
        raise PydanticCustomError("size", "write a size such as 65536, 64KiB, 16MB")
    return int(match.group(1)) * _SIZES[(match.group(2) or "").lower()]


def _checked_template(text: str) -> str:
    try:
        Template.parse(text)
    except TemplateError as error:
        raise PydanticCustomError("template", "{why}", {"why": str(error)}) from error
    return text


def _no_template(text: str) -> str:
    if "${" in text:
        raise PydanticCustomError("template", "a template is not allowed here; stream, key and headers take them")
    return text


HASHED = "secrets as hashes"
SECRET_WORDS = ("password", "secret", "token", "jaas", "key", "salt")
"""A field or an option with one of these in its name holds what must not be shown."""


def _told_secret(secret: SecretStr, info: SerializationInfo) -> str:
    """Stars for whoever looks; a hash where the context asks for one, so that a changed secret can be noticed."""
    if info.context != HASHED or not secret.get_secret_value():
        return str(secret)
    return hashlib.sha256(secret.get_secret_value().encode()).hexdigest()


_DURATION_SCHEMA = {
    "anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": f"^{_DURATION.pattern}$"}]
}
_SIZE_SCHEMA = {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string"}]}

Duration = Annotated[int, BeforeValidator(duration_ms), WithJsonSchema(_DURATION_SCHEMA)]
Size = Annotated[int, BeforeValidator(size_bytes), WithJsonSchema(_SIZE_SCHEMA)]
Secret = Annotated[SecretStr, PlainSerializer(_told_secret, when_used="json")]
Text = Annotated[str, AfterValidator(_no_template)]
NonEmpty = Annotated[str, Field(min_length=1), AfterValidator(_no_template)]
TemplateText = Annotated[str, Field(min_length=1), AfterValidator(_checked_template)]
# Names become directories, metric labels and parts of ids: a closed alphabet needs no escaping anywhere.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$")]
