"""What no single field can know: ids that are used twice, the order of processors, templates against known fields."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from millstream.pipelines.errors import Problem
from millstream.pipelines.processors import Aggregate, Deduplicate, Filter, RouteByRule
from millstream.pipelines.sinks import RedisSink
from millstream.pipelines.spec.document import Document, Path
from millstream.pipelines.spec.pipeline import Pipeline
from millstream.pipelines.templates import Template

STATEFUL = ("deduplicate", "aggregate")
PER_BATCH = ("sql", "python")


def order_problems(kinds: Sequence[object]) -> list[tuple[int, str]]:
    problems: list[tuple[int, str]] = []
    per_batch: str | None = None
    aggregated = False
    for index, kind in enumerate(kinds):
        if kind in STATEFUL and per_batch is not None:
            why = (
                f"{kind} cannot stand after {per_batch}: {per_batch} runs inside each batch, and {kind} keeps state "
                f"over batches, which Spark does before a batch begins. Put {kind} first."
            )
            problems.append((index, why))
        elif kind in STATEFUL and aggregated:
            why = (
                f"{kind} cannot stand after aggregate: a window's event leaves when the watermark has passed it, so "
                f"everything that follows would find it late. Put {kind} first, or use a second pipeline."
            )
            problems.append((index, why))
        if kind in PER_BATCH:
            per_batch = str(kind)
        aggregated = aggregated or kind == "aggregate"
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
    _check_streams(document, pipeline)
    _check_templates(document, pipeline)
    _check_names(document, pipeline)


def _check_streams(document: Document, pipeline: Pipeline) -> None:
    routed = any(isinstance(processor, RouteByRule) for processor in pipeline.spec.processors)
    for index, sink in enumerate(pipeline.spec.sinks):
        if isinstance(sink, RedisSink) and sink.config.stream is None and not routed:
            message = "this is missing and must be given, unless a route processor names the streams"
            document.report(("spec", "sinks", index, "config", "stream"), message)


def _check_names(document: Document, pipeline: Pipeline) -> None:
    """An aggregate's id becomes its events' table, and the beginning of their ids."""
    seen: set[str] = set()
    for index, processor in enumerate(pipeline.spec.processors):
        if processor.id is not None and processor.id in seen:
            document.report(("spec", "processors", index, "id"), f"the id {processor.id!r} is used twice")
        if processor.id is not None:
            seen.add(processor.id)


def _check_templates(document: Document, pipeline: Pipeline) -> None:
    """Where the source's fields are known, a field that no table has cannot be meant. Processors that rename end
    what is known; a filter by table narrows it."""
    known = pipeline.spec.source.fields()
    for index, processor in enumerate(pipeline.spec.processors):
        if known is None:
            return
        for path, text in _processor_texts(processor):
            _check_text(document, ("spec", "processors", index, *path), text, known)
        if processor.renames or isinstance(processor, Aggregate | Deduplicate):
            known = known if isinstance(processor, Deduplicate) else None
        elif isinstance(processor, Filter) and processor.tables:
            exact = {table.rpartition(".")[2] for table in processor.tables}
            narrowed = {table: fields for table, fields in known.items() if table in exact}
            known = narrowed or known
    if known is None:
        return
    for index, sink in enumerate(pipeline.spec.sinks):
        if isinstance(sink, RedisSink):
            texts: list[tuple[Path, str | None]] = [(("stream",), sink.config.stream), (("key",), sink.config.key)]
            texts += [(("headers", name), text) for name, text in sink.config.headers.items()]
            for path, maybe in texts:
                if maybe is not None:
                    _check_text(document, ("spec", "sinks", index, "config", *path), maybe, known)


def _processor_texts(processor: Any) -> Iterator[tuple[Path, str]]:
    if isinstance(processor, RouteByRule):
        for index, rule in enumerate(processor.rules):
            yield ("rules", index, "stream"), rule.stream
        if processor.default is not None:
            yield ("default",), processor.default


def _check_text(document: Document, path: Path, text: str, known: dict[str, frozenset[str]]) -> None:
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
