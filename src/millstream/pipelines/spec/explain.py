"""What pydantic found, in the words of the spec: where it stands in the file, and what is allowed there."""

from __future__ import annotations

import difflib
import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from millstream.pipelines.spec.document import Document, Path
from millstream.pipelines.spec.part import IN_WORDS, SECRET_WORDS
from millstream.pipelines.spec.pipeline import Pipeline


def explain(document: Document, error: Mapping[str, Any]) -> tuple[Path, str]:
    path = _in_file(document, error["loc"])
    kind, context = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        allowed = _allowed_at(error["loc"][:-1])
        here = f"allowed here: {', '.join(allowed)}" if allowed else "nothing may be given here; take it away"
        return path, f"unknown field; {_nearest(str(path[-1]), allowed)}{here}"
    if kind == "missing":
        return path, "this is missing and must be given"
    if kind == "union_tag_invalid":
        allowed = [word.strip().strip("'") for word in str(context.get("expected_tags", "")).split(",")]
        tag = str(context.get("tag"))
        return (*path, "type"), f"{tag!r} is unknown; {_nearest(tag, allowed)}allowed here: {', '.join(allowed)}"
    if kind == "string_pattern_mismatch":
        error = {**error, "msg": f"write {IN_WORDS.get(context['pattern'], 'it in another way')}"}
    if kind == "union_tag_not_found":
        return (*path, "type"), "the type is missing and must be given"
    message = str(error["msg"])
    got = error.get("input")
    if isinstance(got, str | int | float | bool) and not _may_be_secret(document, path, str(got)):
        message += f" (not {str(got)[:80]!r})"
    return path, message[:1].lower() + message[1:]


def _may_be_secret(document: Document, path: Path, got: str) -> bool:
    """Whether a wrong value is better not repeated: it came from the environment, its field's name says so, or it looks
    like an address, whose password may stand anywhere in it when the address is wrong."""
    name = str(path[-1]).lower() if path else ""
    named = name in ("uri", "dsn") or any(word in name for word in SECRET_WORDS)
    return named or path in document.from_environment or "://" in got or "@" in got


def _nearest(word: str, allowed: list[str]) -> str:
    close = difflib.get_close_matches(word, allowed, n=1)
    return f"did you mean {close[0]}? " if close else ""


def _in_file(document: Document, loc: tuple[Any, ...]) -> Path:
    """pydantic's path without the tags of unions, which are not in the file. A missing field ends the path."""
    value, path = document.value, []
    for index, step in enumerate(loc):
        if (isinstance(value, Mapping) and step in value) or (
            isinstance(value, list) and isinstance(step, int) and step < len(value)
        ):
            value = value[step]
            path.append(step)
        elif index == len(loc) - 1 and isinstance(step, str) and isinstance(value, Mapping):
            path.append(step)
    return tuple(path)


def _allowed_at(loc: tuple[Any, ...]) -> list[str]:
    """The fields of the model that ``loc`` leads to, by their names in YAML."""
    kinds: list[Any] = [Pipeline]
    for step in loc:
        kinds = [found for kind in kinds for found in _below(kind, step)] or kinds
    models = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
    names = {field.alias or name for model in models for name, field in model.model_fields.items()}
    return sorted(names)


def _below(kind: Any, step: Any) -> list[Any]:
    models = _models(kind)
    by_tag = [model for model in models if step in _tags(model)]
    if by_tag:
        return by_tag
    found: list[Any] = []
    for model in models:
        for name, field in model.model_fields.items():
            if step in (name, field.alias):
                found.append(field.annotation)
    return found


def _models(kind: Any) -> list[type[BaseModel]]:
    """Every model inside a type, whatever lists, unions and annotations are around it."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind]
    if get_origin(kind) in (Annotated, Union, types.UnionType, list, dict):
        return [model for part in get_args(kind) for model in _models(part)]
    return []


def _tags(model: type[BaseModel]) -> tuple[Any, ...]:
    field = model.model_fields.get("type")
    return get_args(field.annotation) if field is not None and get_origin(field.annotation) is Literal else ()
