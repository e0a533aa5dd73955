"""What the commands of ``millstream pipeline`` take: files with one pipeline each, and the token of their port."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millstream.errors import InvalidArgument, MillstreamError

if TYPE_CHECKING:
    from millstream.pipelines import PipelinePlan

Files = Annotated[list[Path], typer.Argument(help="YAML files, one pipeline each.", show_default=False)]
File = Annotated[Path, typer.Argument(help="The pipeline's YAML file.", show_default=False)]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--http-token-file",
        help="A file with the token that every request must bring; or set MILLSTREAM_HTTP_TOKEN.",
        show_default=False,
    ),
]


def plans_of(files: list[Path]) -> list[PipelinePlan]:
    from millstream.pipelines import load_pipelines, make_plan

    return [make_plan(pipeline) for pipeline in load_pipelines(files)]


class SparkMissing(MillstreamError):
    """Pipelines run on Spark, and it is not installed."""


def missing_parts(plans: Sequence[PipelinePlan] = ()) -> Iterator[str]:
    """What pipelines would miss on this machine, and how to get it. Imports nothing of it."""
    from millstream.pipelines import java_problem

    if find_spec("pyspark") is None:
        yield "Spark is not installed, and pipelines run on it. Install it: pip install 'millstream[spark]'"
    if (problem := java_problem()) is not None:
        yield problem
    sources = {made.pipeline.spec.source.type for made in plans}
    for source, module, name in (
        ("postgres", "psycopg", "psycopg"),
        ("mariadb", "pymysqlreplication", "mysql-replication"),
    ):
        if source in sources and find_spec(module) is None:
            yield f"The source {source} needs {name}, which is not installed. Install it: pip install 'millstream[cdc]'"


def need_spark(plans: Sequence[PipelinePlan] = ()) -> None:
    """Raises SparkMissing with the command that installs what is missing."""
    for missing in missing_parts(plans):
        raise SparkMissing(missing)


def token_in(file: Path | None, option: str = "--http-token-file") -> str | None:
    """Never on the command line, where everybody on the machine could read it."""
    if file is None:
        return os.environ.get("MILLSTREAM_HTTP_TOKEN") or None
    try:
        token = file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as problem:
        raise InvalidArgument(option, str(file), f"a file that can be read ({problem})") from problem
    if not token:
        raise InvalidArgument(option, str(file), "a file that holds a token")
    return token
