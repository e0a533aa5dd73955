"""What no single field can know: ids that are used twice, the order of processors, templates against known fields."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from millstream.pipelines.errors import Problem
from millstream.pipelines.paths import FieldPath
from millstream.pipelines.processors import PROCESSORS, Processor
from millstream.pipelines.processors.processor import Fields
from millstream.pipelines.spec.document import Document, DocumentPath
from millstream.pipelines.spec.pipeline import Pipeline
from millstream.pipelines.templates import Template


def order_problems(types: Sequence[object]) -> list[tuple[int, str]]:
    """In which order processors may stand, by their types alone: over plain values, before anything is validated."""
    problems: list[tuple[int, str]] = []
    per_batch: str | None = None
    windows = False
    for index, type_ in enumerate(types):
        found = PROCESSORS.get(type_) if isinstance(type_, str) else None
        if found is None or not issubclass(found, Processor):
            continue  # said already: such a type is unknown
        if found.kind == "stateful" and per_batch is not None:
            why = (
                f"{type_} cannot stand after {per_batch}: {per_batch} runs inside each batch, and {type_} keeps state "
                f"over batches, which Spark does before a batch begins. Put {type_} first."
            )
            problems.append((index, why))
        elif found.kind == "stateful" and windows:
            why = (
                f"{type_} cannot stand after aggregate: a window's event leaves when the watermark has passed it, so "
                f"everything that follows would find it late. Put {type_} first, or use a second pipeline."
            )
            problems.append((index, why))
        if found.kind == "per batch":
            per_batch = str(type_)
        windows = windows or found.makes_events
    return problems


def check_file(document: Document) -> None:
    """Over the plain values, so that these are reported together with whatever else is wrong."""
    spec = document.value.get("spec") if isinstance(document.value, dict) else None
    if not isinstance(spec, dict):
        return
    seen: dict[str, int] = {}
    for index, sink in enumerate(_dicts(spec.get("sinks"))):
        name = (sink.get("config") or {}).get("id") if isinstance(sink.get("config"), dict) else None
        if isinstance(name, str) and name:  # empty: a variable is not set, which is said already
            if name in seen:
                document.report(
                    ("spec", "sinks", index, "config", "id"),
                    f"sinks[{seen[name]}] has the id {name!r} already; each sink needs its own",
                )
            seen.setdefault(name, index)
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


def _check_parts(document: Document, pipeline: Pipeline) -> None:
    """What the parts themselves find wrong with the rest of the spec."""
    for path, message in pipeline.spec.source.misfits(pipeline.spec):
        document.report(("spec", *path), message)
    for index, sink in enumerate(pipeline.spec.sinks):
        for path, message in sink.misfits(pipeline.spec):
            document.report(("spec", "sinks", index, *path), message)


def _check_names(document: Document, pipeline: Pipeline) -> None:
    """An aggregate's id becomes its events' table, and the beginning of their ids."""
    seen: set[str] = set()
    for index, processor in enumerate(pipeline.spec.processors):
        if processor.id is not None and processor.id in seen:
            document.report(("spec", "processors", index, "id"), f"the id {processor.id!r} is used twice")
        if processor.id is not None:
            seen.add(processor.id)


def _check_fields(document: Document, pipeline: Pipeline) -> None:
    """A mask whose field can never be there hides nothing, and nobody would notice."""
    processors = pipeline.spec.processors
    for index, processor in enumerate(processors):
        for name in processor.named_fields():
            why = _never_there(FieldPath.of_row(name), processors[:index], pipeline.spec.source.fields())
            if why is not None:
                document.report(("spec", "processors", index, "fields", name), f"it can never match: {why}")


def _never_there(path: FieldPath, before: Sequence[Processor], known: Fields | None) -> str | None:
    """Why no row can have ``path`` behind these processors: the way back from there to the source."""
    for number, processor in reversed(list(enumerate(before))):
        why = processor.takes_away(path)
        if why is not None:
            return f"processors[{number}] ({processor.kind_name}): {why}"
        earlier = processor.before(path)
        if earlier is None:
            return None
        path = earlier
    every = sorted(frozenset().union(*known.values())) if known else []
    if not every or path[0] in every:
        return None
    return f"the source has no field {path[0]!r}; there are {', '.join(every)}"


def _check_templates(document: Document, pipeline: Pipeline) -> None:
    """Where the source's fields are known, a field that no table has cannot be meant. Processors that rename end
    what is known; a filter by table narrows it."""
    known: Fields | None = pipeline.spec.source.fields()
    for index, processor in enumerate(pipeline.spec.processors):
        if known is None:
            return
        for path, text in processor.templates():
            _check_text(document, ("spec", "processors", index, *path), text, known)
        known = processor.fields_after(known)
    if known is None:
        return
    for index, sink in enumerate(pipeline.spec.sinks):
        for path, text in sink.templates():
            _check_text(document, ("spec", "sinks", index, *path), text, known)


def _check_text(document: Document, path: DocumentPath, text: str, known: Fields) -> None:
    every = sorted(frozenset().union(*known.values()))
    for reference in Template.parse(text).references():
        if reference.root in ("before", "after", "row") and reference.field.partition(".")[0] not in every:
            tables = ", ".join(known)
            document.report(path, f"${{{reference}}}: no such field in {tables}; there are {', '.join(every)}")


def check_together(pipelines: Sequence[Pipeline], files: Sequence[str]) -> list[Problem]:
    """Pipelines that run in one session need names and checkpoints of their own."""
    problems: list[Problem] = []
    names = [pipeline.name for pipeline in pipelines]
    checkpoints = [os.path.realpath(pipeline.checkpoint_path) for pipeline in pipelines]
    for what, keys in (("name", names), ("checkpoint", checkpoints)):
        seen: dict[str, str] = {}
        for key, file in zip(keys, files, strict=True):
            if key in seen:
                problems.append(Problem(file, 0, "", f"its {what} is that of {seen[key]} already; each needs its own"))
            seen.setdefault(key, file)
    return problems
