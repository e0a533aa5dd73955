"""``millstream pipeline ls``, ``status`` and ``checkpoints``, and the arguments that all pipeline commands share.

The state of a running pipeline is read from its process; otherwise from its checkpoint.
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
from millstream.cli.show import Column, Output, OutputKind, ident, name, number, text
from millstream.errors import InvalidArgument, MillstreamError
from millstream.observe.format import duration, moment, named, printable

if TYPE_CHECKING:
    from millstream.pipelines import PipelinePlan

Files = Annotated[list[Path], typer.Argument(help="YAML files, one pipeline each.", show_default=False)]
File = Annotated[Path, typer.Argument(help="The pipeline's YAML file.", show_default=False)]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--http-token-file",
        help="A file with the required access token; or set MILLSTREAM_HTTP_TOKEN.",
        show_default=False,
    ),
]


def plans_of(files: list[Path]) -> list[PipelinePlan]:
    from millstream.pipelines import load_pipelines
    from millstream.pipelines.plan import make_plan

    return [make_plan(pipeline) for pipeline in load_pipelines(files)]


class SparkMissing(MillstreamError):
    """Spark, or something that it needs, is not installed."""


def missing_parts(plans: Sequence[PipelinePlan] = (), *, trust_release_file: bool = False) -> Iterator[str]:
    """Yield what is missing on this machine to run the pipelines, and how to install it. Does not import Spark."""
    from millstream.pipelines.session import java_problem

    if find_spec("pyspark") is None:
        yield "Pipelines need Spark, which is not installed. Install it: pip install 'millstream[spark]'"
    if (problem := java_problem(trust_release_file=trust_release_file)) is not None:
        yield problem
    sources = {made.pipeline.spec.source.type for made in plans}
    for source, module, package in (
        ("postgres", "psycopg", "psycopg"),
        ("mariadb", "pymysqlreplication", "mysql-replication"),
    ):
        if source in sources and find_spec(module) is None:
            remedy = "Install it: pip install 'millstream[cdc]'"
            yield f"The source {source} needs {package}, which is not installed. {remedy}"


def need_spark(plans: Sequence[PipelinePlan] = ()) -> None:
    """Raises SparkMissing with the command that installs what is missing."""
    for missing in missing_parts(plans, trust_release_file=True):
        raise SparkMissing(missing)


def token_in(file: Path | None, option: str = "--http-token-file") -> str | None:
    """Read an access token from a file or the environment; command lines are visible to all users of the machine."""
    if file is None:
        return os.environ.get("MILLSTREAM_HTTP_TOKEN") or None
    try:
        token = file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise InvalidArgument(option, str(file), f"a file that can be read ({error})") from error
    if not token:
        raise InvalidArgument(option, str(file), "a file that contains a token")
    return token


def list_pipelines(
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            help="YAML files, or directories with them; by default the current directory.", show_default=False
        ),
    ] = None,
    token_file: TokenFile = None,
    output: Output = OutputKind.table,
) -> None:
    """List the pipelines of a directory with their state; other YAML files are ignored."""
    items = [_status_of(file, token_in(token_file)) for file in _pipeline_files(paths or ["."])]
    columns = [
        name("pipeline"),
        Column("state", "state", "not"),
        number("batch"),
        number("rows_per_second", "rows/s"),
    ]
    columns += [number("lag"), name("source", spare=True), text("sinks", spare=True, render=_joined)]
    columns += [text("holder", "run by", render=_run_by), name("file")]
    show.rows(output, columns, items)


def _status_of(file: Path, token: str | None) -> dict[str, Any]:
    from millstream.pipelines import CheckpointRefused, SpecRefused

    item: dict[str, Any] = dict.fromkeys(("pipeline", "state", "batch", "rows_per_second", "lag", "source", "holder"))
    item |= {"sinks": [], "file": str(file)}
    try:
        [made] = plans_of([file])
        item |= {"pipeline": made.pipeline.name, "source": made.pipeline.spec.source.type}
        item["sinks"] = [sink.config.id for sink in made.pipeline.spec.sinks]
        record = _record(made, None, token)
    except SpecRefused:
        return item | {"state": "not valid"}
    except CheckpointRefused:
        return item | {"state": "does not fit its checkpoint"}
    progress = record["progress"]
    item |= {
        "state": record["state"],
        "batch": record["batch"],
        "lag": progress.get("lag"),
        "holder": record.get("holder"),
    }
    return item | {"rows_per_second": progress.get("processed_rows_per_second")}


def _pipeline_files(paths: list[str]) -> list[Path]:
    files: list[Path] = []
    for raw in paths:
        path = Path(raw)
        if path.is_dir():
            files += [file for file in sorted(path.glob("*.y*ml")) if b"kind: Pipeline" in _read_start(file)]
        elif path.is_file():
            files.append(path)
        else:
            from millstream.broker.transport.targets import redacted

            raise InvalidArgument("files", redacted(raw), "an existing file or directory")
    return files


def _read_start(file: Path, limit: int = 65_536) -> bytes:
    with file.open("rb") as opened:
        return opened.read(limit)


def _run_by(holder: dict[str, Any] | None) -> str:
    return "" if not holder else printable(f"process {holder['process']} on {holder['host']} since {holder['since']}")


def _joined(names: list[str]) -> str:
    return ", ".join(map(printable, names))


def _record(made: PipelinePlan, http_port: int | None, token: str | None) -> dict[str, Any]:
    from dataclasses import asdict

    from millstream.pipelines import Checkpoint
    from millstream.pipelines.status import at_rest

    checkpoint = Checkpoint.of(made.pipeline)
    url = f"http://127.0.0.1:{http_port}" if http_port is not None else checkpoint.answers_at()
    live = _live(made.pipeline.name, url, token) if url else None
    if live is not None:
        return live
    if (process := checkpoint.run_by()) is not None:
        reason = f"which did not answer at {url}" if url else "which has no HTTP port (--http-port 0)"
        show.warning(
            f"{named(made.pipeline.name)} runs in process {process}, {reason}. The state is read from its checkpoint."
        )
    return asdict(at_rest(made, checkpoint))


def status(
    file: File,
    http_port: Annotated[
        int | None, typer.Option("--http-port", help="Port of its process, if the checkpoint does not record it.")
    ] = None,
    token_file: TokenFile = None,
    output: Output = OutputKind.table,
) -> None:
    """Show the state of a pipeline: from its process if it runs, else from its checkpoint."""
    [made] = plans_of([file])
    record = _record(made, http_port, token_in(token_file))
    if record["source"] == "unknown":  # the process was not reached
        record["progress"] |= _slot_at_rest(made)
    if output is OutputKind.json:
        show.as_json(record)
        return
    lines = _labelled(record)
    show.facts([_column(label, value) for label, value in lines.items()], lines)


def _column(label: str, value: Any) -> Column:
    numeric = isinstance(value, (int, float)) and "batch" not in label
    return number(label, label) if numeric else text(label, label)


def _labelled(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record with labels for people. Values that the source does not know are left out."""
    progress = record["progress"]
    numbers = {"rows": "rows", "rows/s": "processed_rows_per_second", "lag": "lag", "batch ms": "batch_ms"}
    return {
        "pipeline": record["name"],
        "state": record["state"],
        **({"error": record["error"]} if record["error"] else {}),
        "last committed batch": record["batch"],
        "batch to be replayed": record["in_flight"],
        "checkpoint": record["checkpoint"],
        **({"run by": _run_by(record["holder"])} if record.get("holder") else {}),
        **({"source": record["source"]} if record["source"] != "unknown" else {}),
        **{label: progress[name] for label, name in numbers.items() if progress.get(name) is not None},
        **_labelled_slot(progress.get("slot")),
        **{f"sink {name}": state for name, state in record["sinks"].items() if state != "unknown"},
        **{f"batches waiting for {name}": count for name, count in record["waiting"].items() if count},
    }


def _labelled_slot(slot: dict[str, Any] | None) -> dict[str, str]:
    if not slot:
        return {}
    since = slot["unacknowledged_s"]
    acknowledged = "" if since is None else f", acknowledged {duration(since * 1000)} ago"
    return {f"slot {slot['name']}": f"{slot['held_bytes']:,} bytes held, {slot['wal_status']}{acknowledged}"}


def _slot_at_rest(made: PipelinePlan) -> dict[str, Any]:
    """Read the replication slot of a stopped pipeline, for which the database also retains its log."""
    from millstream.errors import MillstreamError
    from millstream.pipelines.status import slot_facts

    source = made.pipeline.spec.source
    try:
        slot = source.slot_status(made.pipeline.name) if source.has_slot else None
    except MillstreamError as error:
        show.warning(printable(str(error)))
        slot = None
    return {} if slot is None else {"slot": slot_facts(slot)}


def _live(name: str, url: str, token: str | None) -> dict[str, Any] | None:
    """Read the status from the process that runs the pipeline; None if no such process answers."""
    from millstream.observe.pipeline_client import PipelineClient, PipelineRefused, PipelinesUnreachable

    try:
        return PipelineClient(url, token=token).status(name)
    except PipelineRefused as error:
        show.warning(printable(str(error)))
    except PipelinesUnreachable:
        pass  # the checkpoint is used instead
    return None


def checkpoints(
    file: File,
    last: Annotated[int, typer.Option(help="How many batches.", min=1)] = 20,
    output: Output = OutputKind.table,
) -> None:
    """List the last batches of the checkpoint with their times and offsets."""
    from millstream.pipelines import Checkpoint

    [made] = plans_of([file])
    checkpoint = Checkpoint.of(made.pipeline)
    batches = checkpoint.batches(last) if checkpoint.owned(made) else []
    items = [
        {
            "batch": batch.id,
            "planned_at": moment(batch.planned_ms),
            "committed_at": moment(batch.committed_ms),
            "offsets": list(batch.offsets),
        }
        for batch in batches
    ]
    columns = [ident("batch"), Column("planned_at", "planned", "not", render=show.plain)]
    columns += [Column("committed_at", "committed", "not", render=show.plain), text("offsets", render=_offsets)]
    show.rows(output, columns, items)


def _offsets(value: Any) -> str:
    return printable(json.dumps(value))
