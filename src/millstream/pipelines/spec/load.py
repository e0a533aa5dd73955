"""A file to a validated pipeline, or one error with every problem that was found; and the schema, for editors."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from millstream.pipelines.errors import Problem, SpecRefused
from millstream.pipelines.spec.checks import check_file, check_together, check_typed
from millstream.pipelines.spec.document import Document, dotted, parse
from millstream.pipelines.spec.explain import explain
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
