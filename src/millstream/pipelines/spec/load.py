"""A file to a validated pipeline, or one error with every problem that was found, in the words of the spec: where it
stands in the file, and what is allowed there. And the schema, for editors.
"""

from __future__ import annotations

import difflib
import os
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from millstream.pipelines.errors import Problem, SpecRefused
from millstream.pipelines.spec.checks import check_file, check_together, check_typed
from millstream.pipelines.spec.document import Document, DocumentPath, dotted, parse
from millstream.pipelines.spec.part import IN_WORDS, SECRET_WORDS
from millstream.pipelines.spec.pipeline import Pipeline


def load_pipelines(files: Sequence[str | Path], environ: Mapping[str, str] | None = None) -> list[Pipeline]:
    """Reads all files before complaining about any: SpecRefused names what is wrong in each of them."""
    problems: list[Problem] = []
    pipelines: list[Pipeline] = []
    for file in files:
        try:
            pipelines.append(load_pipeline(file, environ))
        except SpecRefused as error:
            problems += error.problems
    problems += check_together(pipelines, [str(file) for file in files]) if not problems else []
    if problems:
        raise SpecRefused(problems)
    return pipelines


def load_pipeline(file: str | Path, environ: Mapping[str, str] | None = None) -> Pipeline:
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecRefused([Problem(str(file), 0, "", f"the file cannot be read: {error}")]) from error
    return parse_pipeline(text, file=str(file), environ=environ)


def parse_pipeline(text: str, *, file: str = "<text>", environ: Mapping[str, str] | None = None) -> Pipeline:
    document = parse(text, file, os.environ if environ is None else environ)
    check_file(document)
    pipeline = _validated(document)
    if pipeline is not None:
        check_typed(document, pipeline)
    if document.problems or pipeline is None:
        raise SpecRefused(document.problems)
    return pipeline


def _validated(document: Document) -> Pipeline | None:
    try:
        return Pipeline.model_validate(document.value)
    except ValidationError as error:
        for one in error.errors(include_url=False):
            path, message = explain(document, one)
            if not _reported(document, path):
                document.report(path, message)
        return None


def _reported(document: Document, path: tuple[Any, ...]) -> bool:
    """An unset variable leaves an empty text behind, which is wrong a second time; once is enough."""
    return any(p.path == dotted(path) and "is not set" in p.message for p in document.problems)


def json_schema() -> dict[str, Any]:
    schema = Pipeline.model_json_schema(by_alias=True, mode="validation")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "millstream/v1/Pipeline", **schema}


def explain(document: Document, error: Mapping[str, Any]) -> tuple[DocumentPath, str]:
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


def _may_be_secret(document: Document, path: DocumentPath, got: str) -> bool:
    """Whether a wrong value is better not repeated: it came from the environment, its field's name says so, or it looks
    like an address, whose password may stand anywhere in it when the address is wrong."""
    name = str(path[-1]).lower() if path else ""
    named = name in ("uri", "dsn") or any(word in name for word in SECRET_WORDS)
    return named or path in document.from_environment or "://" in got or "@" in got


def _nearest(word: str, allowed: list[str]) -> str:
    close = difflib.get_close_matches(word, allowed, n=1)
    return f"did you mean {close[0]}? " if close else ""


def _in_file(document: Document, loc: tuple[Any, ...]) -> DocumentPath:
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
