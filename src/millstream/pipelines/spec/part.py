"""What every part of a spec is built from: closed models, durations, sizes, names, templates."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Annotated, Any, Union, get_args

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

from millstream.errors import InvalidArgument
from millstream.model import DURATION_PATTERN, SIZE_PATTERN, parse_duration_ms, parse_size_bytes
from millstream.pipelines.templates import Template, TemplateError


class Part(BaseModel):
    """A closed, frozen model: a field that it does not know is an error, never ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def classes(package: str, names: Sequence[str]) -> dict[str, type[Part]]:
    """The classes of a list such as ``("redis.RedisSink", ...)``, each by what the spec calls it: its ``type``."""
    found = [
        getattr(import_module(f"{package}.{module}"), name) for module, _, name in (n.partition(".") for n in names)
    ]
    return {get_args(kind.model_fields["type"].annotation)[0]: kind for kind in found}


def one_of(kinds: Mapping[str, type[Part]]) -> Any:
    """A field of the spec whose ``type`` chooses among these classes."""
    return Annotated[Union[tuple(kinds.values())], Field(discriminator="type")]  # noqa: UP007  # made at run time


def _duration_ms(value: Any) -> int:
    """``10 minutes``, ``5s``, ``100ms``."""
    return _parsed("duration", parse_duration_ms, value)


def _bare_duration_ms(value: Any) -> int:
    """For a field whose name ends in ``_ms``: a number alone is what it says."""
    return _parsed("duration", partial(parse_duration_ms, bare_ms=True), value)


def _size_bytes(value: Any) -> int:
    return _parsed("size", parse_size_bytes, value)


def _parsed(kind: str, parse: Callable[[Any, str], int], value: Any) -> int:
    try:
        return parse(value, kind)
    except InvalidArgument as error:
        raise PydanticCustomError(kind, "write {allowed}", {"allowed": error.allowed}) from error


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


IN_WORDS: dict[str, str] = {}
"""What each pattern of the spec asks for, for people."""


def written_as(pattern: str, words: str) -> Any:
    """A field whose text must match the pattern; whoever gets it wrong is told the words."""
    IN_WORDS[pattern] = words
    return Field(pattern=pattern)


_DURATION_SCHEMA = {"type": "string", "pattern": f"^{DURATION_PATTERN}$"}
_BARE_DURATION_SCHEMA = {"anyOf": [{"type": "integer", "minimum": 0}, _DURATION_SCHEMA]}
_SIZE_SCHEMA = {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": f"^{SIZE_PATTERN}$"}]}

Duration = Annotated[int, BeforeValidator(_duration_ms), WithJsonSchema(_DURATION_SCHEMA)]
BareDuration = Annotated[int, BeforeValidator(_bare_duration_ms), WithJsonSchema(_BARE_DURATION_SCHEMA)]
"""For a field whose name ends in ``_ms``."""
Size = Annotated[int, BeforeValidator(_size_bytes), WithJsonSchema(_SIZE_SCHEMA)]
Secret = Annotated[SecretStr, PlainSerializer(_told_secret, when_used="json")]
Text = Annotated[str, AfterValidator(_no_template)]
NonEmpty = Annotated[str, Field(min_length=1), AfterValidator(_no_template)]
TemplateText = Annotated[str, Field(min_length=1), AfterValidator(_checked_template)]
# Names become directories, metric labels and parts of ids: a closed alphabet needs no escaping anywhere.
Name = Annotated[
    str,
    written_as(
        r"^[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$",
        "1 to 63 letters, digits, dots, dashes and underscores, beginning and ending with a letter or a digit",
    ),
]
