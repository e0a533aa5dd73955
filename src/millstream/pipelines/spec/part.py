"""The types of all parts of a spec: closed models, durations, sizes, names, templates."""

from __future__ import annotations

import ast
import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib import import_module
from itertools import pairwise
from typing import Annotated, Any, Union, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PlainSerializer,
    SecretStr,
    SerializationInfo,
    WithJsonSchema,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from millstream.errors import InvalidArgument
from millstream.model import DURATION_PATTERN, SIZE_PATTERN, parse_duration_ms, parse_size_bytes
from millstream.pipelines.templates import Template, TemplateError


class Part(BaseModel):
    """A frozen model in which an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Describes each field by the docstring below it.

        The source is parsed only when a schema is generated. pydantic's own option for this would parse it at every
        import, which would take 50 % longer.
        """
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        descriptions = field_descriptions(cls)
        for name, field in cls.model_fields.items():
            if name in descriptions:
                properties[field.alias or name]["description"] = descriptions[name]
        return schema


@cache
def field_descriptions(model: type[Part]) -> dict[str, str]:
    """The docstring below each field of the model and of its base classes, in one line."""
    descriptions: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, Part):
            [tree] = ast.parse(inspect.getsource(base)).body
            assert isinstance(tree, ast.ClassDef), "the source of a class"
            for field, below in pairwise(tree.body):
                text = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else 0
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, str):
                    descriptions[field.target.id] = " ".join(text.split()).replace("``", "`")
    return descriptions


def classes(package: str, names: Sequence[str]) -> dict[str, type[Part]]:
    """The classes of a list such as ``("redis.RedisSink", ...)``, by their ``type`` in the spec."""
    paths = [
        getattr(import_module(f"{package}.{module}"), name) for module, _, name in (n.partition(".") for n in names)
    ]
    return {get_args(kind.model_fields["type"].annotation)[0]: kind for kind in paths}


def one_of(kinds: Mapping[str, type[Part]]) -> Any:
    """A field of the spec whose ``type`` chooses among these classes."""
    return Annotated[Union[tuple(kinds.values())], Field(discriminator="type")]  # noqa: UP007  # made at run time


def _duration_ms(value: Any) -> int:
    """``10 minutes``, ``5s``, ``100ms``."""
    return _parsed("duration", parse_duration_ms, value)


def _bare_duration_ms(value: Any) -> int:
    """For a field whose name ends in ``_ms``: a number without a unit is in milliseconds."""
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
"""A field or an option with one of these in its name is secret."""


def _masked_secret(secret: SecretStr, info: SerializationInfo) -> str:
    """Stars for display; a hash if the context asks for one, so that a changed secret is noticed."""
    if info.context != HASHED or not secret.get_secret_value():
        return str(secret)
    return hashlib.sha256(secret.get_secret_value().encode()).hexdigest()


IN_WORDS: dict[str, str] = {}
"""The description of each pattern of the spec, for error messages."""


def written_as(pattern: str, description: str) -> Any:
    """A field whose text must match the pattern; errors quote the description."""
    IN_WORDS[pattern] = description
    return Field(pattern=pattern)


_DURATION_SCHEMA = {"type": "string", "pattern": f"^{DURATION_PATTERN}$"}
_BARE_DURATION_SCHEMA = {"anyOf": [{"type": "integer", "minimum": 0}, _DURATION_SCHEMA]}
_SIZE_SCHEMA = {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": f"^{SIZE_PATTERN}$"}]}

Duration = Annotated[int, BeforeValidator(_duration_ms), WithJsonSchema(_DURATION_SCHEMA)]
BareDuration = Annotated[int, BeforeValidator(_bare_duration_ms), WithJsonSchema(_BARE_DURATION_SCHEMA)]
"""For a field whose name ends in ``_ms``."""
Size = Annotated[int, BeforeValidator(_size_bytes), WithJsonSchema(_SIZE_SCHEMA)]
Secret = Annotated[SecretStr, PlainSerializer(_masked_secret, when_used="json")]
Text = Annotated[str, AfterValidator(_no_template)]
NonEmpty = Annotated[str, Field(min_length=1), AfterValidator(_no_template)]
TemplateText = Annotated[str, Field(min_length=1), AfterValidator(_checked_template)]
# Names become directories, metric labels and parts of ids. A restricted alphabet needs no escaping anywhere.
Name = Annotated[
    str,
    written_as(
        r"^[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$",
        "1 to 63 letters, digits, dots, dashes and underscores, beginning and ending with a letter or a digit",
    ),
]
