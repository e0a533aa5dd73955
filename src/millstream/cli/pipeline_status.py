"""``millstream pipeline ls``, ``status`` and ``checkpoints``: how pipelines stand; live where they run. And what all
commands of ``millstream pipeline`` take: files with one pipeline each, and the token of their port.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millstream.cli import show
from millstream.cli.show import Output, OutputKind, ShownColumn, ident, name, number, text
from millstream.errors import InvalidArgument, MillstreamError
from millstream.observe import duration, moment, named, printable

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
    for source, module, package in (
        ("postgres", "psycopg", "psycopg"),
        ("mariadb", "pymysqlreplication", "mysql-replication"),
    ):
        if source in sources and find_spec(module) is None:
            mend = "Install it: pip install 'millstream[cdc]'"
            yield f"The source {source} needs {package}, which is not installed. {mend}"


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


def list_pipelines(
    places: Annotated[
        list[Path] | None,
        typer.Argument(help="YAML files, or directories of them; by default this one.", show_default=False),
    ] = None,
    token_file: TokenFile = None,
    output: Output = OutputKind.table,
) -> None:
    """Pipelines whose files lie here, and how each stands; other YAML files are passed over."""
    items = [_status_of(file, token_in(token_file)) for file in _pipeline_files(places or [Path()])]
    columns = [
        name("pipeline"),
        ShownColumn("state", "state", "not"),
        number("batch"),
        number("rows_per_second", "rows/s"),
    ]
    columns += [number("lag"), name("source"), text("sinks", shown=_joined), name("file", spare=True)]
    show.rows(output, columns, items)


def _status_of(file: Path, token: str | None) -> dict[str, Any]:
    from millstream.pipelines import CheckpointRefused, SpecRefused

    item: dict[str, Any] = dict.fromkeys(("pipeline", "state", "batch", "rows_per_second", "lag", "source"))
    item |= {"sinks": [], "file": str(file)}
    try:
        [made] = plans_of([file])
        item |= {"pipeline": made.pipeline.name, "source": made.pipeline.spec.source.type}
        item["sinks"] = [sink.config.id for sink in made.pipeline.spec.sinks]
        found = _record(made, None, token)
    except SpecRefused:
        return item | {"state": "not valid"}
    except CheckpointRefused:
        return item | {"state": "does not fit its checkpoint"}
    progress = found["progress"]
    item |= {"state": found["state"], "batch": found["batch"], "lag": progress.get("lag")}
    return item | {"rows_per_second": progress.get("processed_rows_per_second")}


def _pipeline_files(places: list[Path]) -> list[Path]:
    found: list[Path] = []
    for place in places:
        if place.is_dir():
            found += [file for file in sorted(place.glob("*.y*ml")) if b"kind: Pipeline" in _opening(file)]
        elif place.is_file():
            found.append(place)
        else:
            raise InvalidArgument("files", str(place), "a file or a directory that is there")
    return found


def _opening(file: Path, most: int = 65_536) -> bytes:
    with file.open("rb") as opened:
        return opened.read(most)


def _joined(names: list[str]) -> str:
    return ", ".join(map(printable, names))


def _record(made: PipelinePlan, http_port: int | None, token: str | None) -> dict[str, Any]:
    from dataclasses import asdict

    from millstream.pipelines import Checkpoint, at_rest

    checkpoint = Checkpoint(made.pipeline.checkpoint_path)
    url = f"http://127.0.0.1:{http_port}" if http_port is not None else checkpoint.answers_at()
    live = _live(made.pipeline.name, url, token) if url else None
    if live is not None:
        return live
    if (process := checkpoint.run_by()) is not None:
        silent = f"which did not answer at {url}" if url else "which answers nowhere (--http-port 0)"
        show.warning(
            f"{named(made.pipeline.name)} runs in process {process}, {silent}. What its checkpoint tells is shown."
        )
    return asdict(at_rest(made, checkpoint))


def status(
    file: File,
    http_port: Annotated[
        int | None, typer.Option("--http-port", help="Where it answers, where its checkpoint does not say.")
    ] = None,
    token_file: TokenFile = None,
    output: Output = OutputKind.table,
) -> None:
    """How the pipeline stands: live where it runs, on whatever port; else from its checkpoint."""
    [made] = plans_of([file])
    found = _record(made, http_port, token_in(token_file))
    if found["source"] == "unknown":  # nobody answered for it
        found["progress"] |= _slot_at_rest(made)
    if output is OutputKind.json:
        show.as_json(found)
        return
    lines = _in_words(found)
    show.facts([_fact(what, value) for what, value in lines.items()], lines)


def _fact(what: str, value: Any) -> ShownColumn:
    numeric = isinstance(value, (int, float)) and "batch" not in what
    return number(what, what) if numeric else text(what, what)


def _in_words(found: dict[str, Any]) -> dict[str, Any]:
    """The record for people. Its source may not know how far it is behind."""
    progress = found["progress"]
    numbers = {"rows": "rows", "rows/s": "processed_rows_per_second", "lag": "lag", "batch ms": "batch_ms"}
    return {
        "pipeline": found["name"],
        "state": found["state"],
        **({"error": found["error"]} if found["error"] else {}),
        "last committed batch": found["batch"],
        "batch to be replayed": found["in_flight"],
        "checkpoint": found["checkpoint"],
        **({"source": found["source"]} if found["source"] != "unknown" else {}),
        **{label: progress[name] for label, name in numbers.items() if progress.get(name) is not None},
        **_slot_in_words(progress.get("slot")),
        **{f"sink {name}": state for name, state in found["sinks"].items() if state != "unknown"},
        **{f"batches waiting for {name}": count for name, count in found["waiting"].items() if count},
    }


def _slot_in_words(slot: dict[str, Any] | None) -> dict[str, str]:
    if not slot:
        return {}
    since = slot["unacknowledged_s"]
    acknowledged = "" if since is None else f", acknowledged {duration(since * 1000)} ago"
    return {f"slot {slot['name']}": f"{slot['held_bytes']:,} bytes held, {slot['wal_status']}{acknowledged}"}


def _slot_at_rest(made: PipelinePlan) -> dict[str, Any]:
    """The database keeps log for a pipeline that does not run, too: all the more a reason to say so."""
    from millstream.errors import MillstreamError
    from millstream.pipelines import slot_facts

    source = made.pipeline.spec.source
    try:
        found = source.slot_status(made.pipeline.name) if source.has_slot else None
    except MillstreamError as problem:
        show.warning(printable(str(problem)))
        found = None
    return {} if found is None else {"slot": slot_facts(found)}


def _live(name: str, url: str, token: str | None) -> dict[str, Any] | None:
    """What the process says that runs the pipeline; None where none answers, or another program does."""
    from millstream.observe import PipelineClient, PipelineRefused, PipelinesUnreachable

    try:
        return PipelineClient(url, token=token).status(name)
    except PipelineRefused as problem:
        show.warning(printable(str(problem)))
    except PipelinesUnreachable:
        pass  # the checkpoint tells
    return None


def checkpoints(
    file: File,
    last: Annotated[int, typer.Option(help="How many batches.", min=1)] = 20,
    output: Output = OutputKind.table,
) -> None:
    """The last batches, as Spark's logs have them: when planned, when committed, up to where."""
    from millstream.pipelines import Checkpoint

    [made] = plans_of([file])
    checkpoint = Checkpoint(made.pipeline.checkpoint_path)
    batches = checkpoint.batches(last) if checkpoint.owned(made) else []
    items = [
        {
            "batch": one.id,
            "planned_at": moment(one.planned_ms),
            "committed_at": moment(one.committed_ms),
            "offsets": list(one.offsets),
        }
        for one in batches
    ]
    columns = [ident("batch"), ShownColumn("planned_at", "planned", "not", shown=show.plain)]
    columns += [ShownColumn("committed_at", "committed", "not", shown=show.plain), text("offsets", shown=_offsets)]
    show.rows(output, columns, items)


def _offsets(value: Any) -> str:
    return printable(json.dumps(value))
