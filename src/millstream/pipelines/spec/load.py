"""Loads a validated pipeline from a file, or raises one error with every problem: its place in the file, and what is
allowed there. Also creates the schema for editors.

It also checks rules across fields: duplicate ids, the order of processors, templates against known fields.
"""

from __future__ import annotations

import difflib
import os
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from millstream.broker.keys import can_have_companions
from millstream.pipelines.errors import Problem, SpecRefused
from millstream.pipelines.paths import FieldPath
from millstream.pipelines.plan import make_plan
from millstream.pipelines.processors import PROCESSORS, Processor
from millstream.pipelines.processors.processor import Fields
from millstream.pipelines.redis_address import without_secrets
from millstream.pipelines.spec.document import Document, DocumentPath, dotted, parse
from millstream.pipelines.spec.part import IN_WORDS, SECRET_WORDS
from millstream.pipelines.spec.pipeline import Pipeline
from millstream.pipelines.templates import Template


def load_pipelines(files: Sequence[str | Path], environ: Mapping[str, str] | None = None) -> list[Pipeline]:
    """Reads all files, then raises one SpecRefused with the problems of all of them."""
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
    """Reads and validates one pipeline file."""
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecRefused([Problem(str(file), 0, "", f"the file cannot be read: {error}")]) from error
    return parse_pipeline(text, file=str(file), environ=environ).in_directory(Path(file).resolve().parent)


def parse_pipeline(text: str, *, file: str = "<text>", environ: Mapping[str, str] | None = None) -> Pipeline:
    """Validates a pipeline from an already parsed YAML value."""
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
        for detail in error.errors(include_url=False):
            path, message = explain(document, detail)
            if not _reported(document, path):
                document.report(path, message)
        return None


def _reported(document: Document, path: tuple[Any, ...]) -> bool:
    """Removes problems that only repeat an unset variable, which became an empty text."""
    return any(p.path == dotted(path) and "is not set" in p.message for p in document.problems)


def json_schema() -> dict[str, Any]:
    """The JSON schema of a pipeline file, for editors."""
    schema = Pipeline.model_json_schema(by_alias=True, mode="validation")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "millstream/v1/Pipeline", **schema}


def explain(document: Document, error: Mapping[str, Any]) -> tuple[DocumentPath, str]:
    path = _in_file(document, error["loc"])
    kind, context = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        allowed = _allowed_at(error["loc"][:-1])
        hint = f"allowed here: {', '.join(allowed)}" if allowed else "nothing may be given here; take it away"
        return path, f"unknown field; {_nearest(str(path[-1]), allowed)}{hint}"
    if kind == "missing":
        return path, "this is missing and must be given"
    if kind == "union_tag_invalid":
        allowed = [tag.strip().strip("'") for tag in str(context.get("expected_tags", "")).split(",")]
        tag = str(context.get("tag"))
        return (*path, "type"), f"{tag!r} is unknown; {_nearest(tag, allowed)}allowed here: {', '.join(allowed)}"
    if kind == "string_pattern_mismatch":
        error = {**error, "msg": f"write {IN_WORDS.get(context['pattern'], 'it in another way')}"}
    if kind == "union_tag_not_found":
        return (*path, "type"), "the type is missing and must be given"
    message = str(error["msg"])
    value = error.get("input")
    if isinstance(value, str | int | float | bool) and not _may_be_secret(document, path, str(value)):
        message += f" (not {str(value)[:80]!r})"
    return path, message[:1].lower() + message[1:]


def _may_be_secret(document: Document, path: DocumentPath, text: str) -> bool:
    """Whether an error must not quote a wrong value: it came from the environment, its field has a secret's name, or it
    looks like an address, whose password may be anywhere if the address is wrong."""
    name = str(path[-1]).lower() if path else ""
    named = name in ("uri", "dsn") or any(part in name for part in SECRET_WORDS)
    return named or path in document.from_environment or "://" in text or "@" in text


def _nearest(name: str, allowed: list[str]) -> str:
    close = difflib.get_close_matches(name, allowed, n=1)
    return f"did you mean {close[0]}? " if close else ""


def _in_file(document: Document, loc: tuple[Any, ...]) -> DocumentPath:
    """pydantic's path without the tags of unions, which are not in the file. It ends at a missing field."""
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
        kinds = [inner for kind in kinds for inner in _below(kind, step)] or kinds
    models = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
    names = {field.alias or name for model in models for name, field in model.model_fields.items()}
    return sorted(names)


def _below(kind: Any, step: Any) -> list[Any]:
    models = _models(kind)
    by_tag = [model for model in models if step in _tags(model)]
    if by_tag:
        return by_tag
    kinds_below: list[Any] = []
    for model in models:
        for name, field in model.model_fields.items():
            if step in (name, field.alias):
                kinds_below.append(field.annotation)
    return kinds_below


def _models(kind: Any) -> list[type[BaseModel]]:
    """Every model inside a type, through lists, unions and annotations."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind]
    if get_origin(kind) in (Annotated, Union, types.UnionType, list, dict):
        return [model for part in get_args(kind) for model in _models(part)]
    return []


def _tags(model: type[BaseModel]) -> tuple[Any, ...]:
    field = model.model_fields.get("type")
    return get_args(field.annotation) if field is not None and get_origin(field.annotation) is Literal else ()


def order_problems(types: Sequence[object]) -> list[tuple[int, str]]:
    """Checks the order of processors by their types, on plain values before validation."""
    problems: list[tuple[int, str]] = []
    per_batch: str | None = None
    windows = False
    for index, type_ in enumerate(types):
        processor_class = PROCESSORS.get(type_) if isinstance(type_, str) else None
        if processor_class is None or not issubclass(processor_class, Processor):
            continue  # an unknown type, which is reported elsewhere
        if processor_class.kind == "stateful" and per_batch is not None:
            why = (
                f"{type_} cannot stand after {per_batch}: {per_batch} runs inside each batch, and {type_} keeps state "
                f"over batches, which Spark does before a batch begins. Put {type_} first."
            )
            problems.append((index, why))
        elif processor_class.kind == "stateful" and windows:
            why = (
                f"{type_} cannot stand after aggregate: an event of a window is emitted after its watermark, so "
                f"everything after it would treat it as late. Put {type_} first, or use a second pipeline."
            )
            problems.append((index, why))
        if processor_class.kind == "per batch":
            per_batch = str(type_)
        windows = windows or processor_class.makes_events
    return problems


def check_file(document: Document) -> None:
    """Checks the plain values of the file, so that these problems are reported together with those of the
    validation."""
    spec = document.value.get("spec") if isinstance(document.value, dict) else None
    if not isinstance(spec, dict):
        return
    first_indexes: dict[str, int] = {}
    for index, sink in enumerate(_dicts(spec.get("sinks"))):
        name = (sink.get("config") or {}).get("id") if isinstance(sink.get("config"), dict) else None
        if isinstance(name, str) and name:  # empty: a variable is not set, which is reported elsewhere
            if name in first_indexes:
                document.report(
                    ("spec", "sinks", index, "config", "id"),
                    f"sinks[{first_indexes[name]}] has the id {name!r} already; each sink needs its own",
                )
            first_indexes.setdefault(name, index)
    kinds = [processor.get("type") for processor in _dicts(spec.get("processors"))]
    for index, why in order_problems(kinds):
        document.report(("spec", "processors", index), why)


def _dicts(values: Any) -> list[dict[str, Any]]:
    return [value if isinstance(value, dict) else {} for value in values] if isinstance(values, list) else []


def check_typed(document: Document, pipeline: Pipeline) -> None:
    _check_parts(document, pipeline)
    _check_templates(document, pipeline)
    _check_names(document, pipeline)
    _check_fields(document, pipeline)
    _check_streams(document, pipeline)


def _check_parts(document: Document, pipeline: Pipeline) -> None:
    """Reports problems that parts find in the rest of the spec."""
    for path, message in pipeline.spec.source.misfits(pipeline.spec):
        document.report(("spec", *path), message)
    for index, sink in enumerate(pipeline.spec.sinks):
        for path, message in sink.misfits(pipeline.spec):
            document.report(("spec", "sinks", index, *path), message)


def _check_names(document: Document, pipeline: Pipeline) -> None:
    """An aggregate's id becomes the table of its events, and the prefix of their ids."""
    names_so_far: set[str] = set()
    for index, processor in enumerate(pipeline.spec.processors):
        if processor.id is not None and processor.id in names_so_far:
            document.report(("spec", "processors", index, "id"), f"the id {processor.id!r} is used twice")
        if processor.id is not None:
            names_so_far.add(processor.id)


def _check_streams(document: Document, pipeline: Pipeline) -> None:
    """A pipeline that writes to a stream that it reads never ends, and dead letters need a separate stream. Names that
    depend on events are known only at run time."""
    spec = pipeline.spec
    sinks: dict[tuple[str, str], int] = {}
    routes = [
        (("spec", "processors", index, *path), text)
        for index, processor in enumerate(spec.processors)
        if processor.names_streams
        for path, text in processor.templates()
    ]
    for path, text in routes:
        _check_name(document, path, Template.parse(text).constant)
    for index, sink in enumerate(spec.sinks):
        named: list[tuple[DocumentPath, str]] = [
            (("spec", "sinks", index, *path), text) for path, text in sink.templates() if path == ("config", "stream")
        ]
        for path, text in named:
            _check_name(document, path, Template.parse(text).constant)
        for address in sink.addresses():
            for path, text in (*named, *routes):
                name = Template.parse(text).constant
                if name is None:
                    continue
                sinks.setdefault((without_secrets(address.uri), name), index)
                if spec.source.reads_stream(address, name):
                    why = f"the source reads {name!r}: the pipeline would never end; name another stream"
                    document.report(path, why)
    target = make_plan(pipeline).dead_letters
    if target is None:
        return
    name, path = target.stream, ("spec", "dlq", "stream")
    _check_name(document, path, name)
    if spec.source.reads_stream(target.address, name):
        document.report(path, f"the source reads {name!r}: each dead letter would be an event; name another stream")
    writer = sinks.get((without_secrets(target.address.uri), name))
    if writer is not None:
        document.report(path, f"sinks[{writer}] writes to {name!r}; dead letters need their own stream")


def _check_name(document: Document, path: DocumentPath, name: str | None) -> None:
    if name is not None and not can_have_companions(name.encode()):
        document.report(path, f"{name!r} cannot be a stream here: a name must not contain a closing brace")


def _check_fields(document: Document, pipeline: Pipeline) -> None:
    """A mask whose field can never exist masks nothing, which would go unnoticed."""
    processors = pipeline.spec.processors
    for index, processor in enumerate(processors):
        for name in processor.named_fields():
            why = _never_there(FieldPath.of_row(name), processors[:index], pipeline.spec.source.fields())
            if why is not None:
                document.report(("spec", "processors", index, "fields", name), f"it can never match: {why}")


def _never_there(path: FieldPath, before: Sequence[Processor], fields_by_table: Fields | None) -> str | None:
    """Why no row can have ``path`` after these processors, followed back to the source."""
    for number, processor in reversed(list(enumerate(before))):
        why = processor.takes_away(path)
        if why is not None:
            return f"processors[{number}] ({processor.kind_name}): {why}"
        earlier = processor.before(path)
        if earlier is None:
            return None
        path = earlier
    every = sorted(frozenset().union(*fields_by_table.values())) if fields_by_table else []
    if not every or path[0] in every:
        return None
    return f"the source has no field {path[0]!r}; there are {', '.join(every)}"


def _check_templates(document: Document, pipeline: Pipeline) -> None:
    """Refuses fields that no table has, if the source's fields are known. After a processor that renames they are
    unknown; a filter by table restricts them."""
    fields_by_table: Fields | None = pipeline.spec.source.fields()
    for index, processor in enumerate(pipeline.spec.processors):
        if fields_by_table is None:
            return
        for path, text in processor.templates():
            _check_text(document, ("spec", "processors", index, *path), text, fields_by_table)
        fields_by_table = processor.fields_after(fields_by_table)
    if fields_by_table is None:
        return
    for index, sink in enumerate(pipeline.spec.sinks):
        for path, text in sink.templates():
            _check_text(document, ("spec", "sinks", index, *path), text, fields_by_table)


def _check_text(document: Document, path: DocumentPath, text: str, fields_by_table: Fields) -> None:
    every = sorted(frozenset().union(*fields_by_table.values()))
    for reference in Template.parse(text).references():
        if reference.root in ("before", "after", "row") and reference.field.partition(".")[0] not in every:
            tables = ", ".join(fields_by_table)
            document.report(path, f"${{{reference}}}: no such field in {tables}; there are {', '.join(every)}")


def check_together(pipelines: Sequence[Pipeline], files: Sequence[str]) -> list[Problem]:
    """Pipelines in one session need different names and checkpoints."""
    problems: list[Problem] = []
    names = [pipeline.name for pipeline in pipelines]
    checkpoints = [pipeline.checkpoint_identity for pipeline in pipelines]
    for kind, keys in (("name", names), ("checkpoint", checkpoints)):
        first_files: dict[str, str] = {}
        for key, file in zip(keys, files, strict=True):
            if key in first_files:
                problems.append(Problem(file, 0, "", f"{first_files[key]} has the same {kind}; give each its own"))
            first_files.setdefault(key, file)
    return problems
