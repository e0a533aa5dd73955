"""``millstream pipeline``: validate, plan, run, look at and reset pipelines."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millstream.cli.exit_codes import FAILED
from millstream.cli.format import printable
from millstream.cli.options import Output, OutputKind, Yes
from millstream.cli.show import as_json, confirm, table

if TYPE_CHECKING:
    from millstream.pipelines.plan import PipelinePlan
    from millstream.pipelines.runner import Runner

app = typer.Typer()

Files = Annotated[list[Path], typer.Argument(help="YAML files, one pipeline each.", show_default=False)]
File = Annotated[Path, typer.Argument(help="The pipeline's YAML file.", show_default=False)]
Http = Annotated[int, typer.Option("--http-port", help="Metrics and control on this loopback port; 0: none.")]


def _plans(files: list[Path]) -> list[PipelinePlan]:
    from millstream.pipelines.plan import plan
    from millstream.pipelines.spec.load import load_pipelines

    return [plan(pipeline) for pipeline in load_pipelines(files)]


@app.command()
def validate(files: Files) -> None:
    """Check the files, and say everything that is wrong with them; nothing is started."""
    for made in _plans(files):
        typer.secho(f"{made.pipeline.name}: fine", fg="green")


@app.command()
def schema() -> None:
    """Print the JSON schema of a pipeline, for editors."""
    from millstream.pipelines.spec.load import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))


@app.command()
def plan(files: Files, output: Output = OutputKind.table) -> None:
    """Show what would run where, how rows are told apart, and whether the checkpoint fits."""
    from millstream.pipelines.checkpoint import Checkpoint
    from millstream.pipelines.errors import CheckpointRefused
    from millstream.pipelines.plan import describe

    for made in _plans(files):
        lines = describe(made)
        checkpoint = Checkpoint(made.pipeline.checkpoint_path)
        try:
            verdicts = checkpoint.verdicts(made) if checkpoint.owned(made) else []
            lines += [
                (f"changed: {v.part}", ("fits: " if v.compatible else "DOES NOT FIT: ") + v.why) for v in verdicts
            ]
        except CheckpointRefused as error:
            lines += [("checkpoint", f"DOES NOT FIT: {why}") for why in error.reasons]
        if output is OutputKind.json:
            as_json({"pipeline": made.pipeline.name, "plan": [{"part": a, "how": b} for a, b in lines]})
        else:
            table(["part", "how"], lines, title=made.pipeline.name)


@app.command()
def run(
    files: Files,
    once: Annotated[bool, typer.Option("--once", help="Drain what is there now, and end.")] = False,
    master: Annotated[str | None, typer.Option("--master", help="Spark's master; wins over the files.")] = None,
    http_port: Http = 9000,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress display.")] = False,
) -> None:
    """Run pipelines in one Spark session until they end or SIGTERM comes; then stop after the current batch."""
    import logging

    from millstream.model import Observer
    from millstream.observe.http import HttpServer, application
    from millstream.observe.metrics import Exposition
    from millstream.observe.pipeline_metrics import PipelineMetrics
    from millstream.observe.pipeline_routes import PipelineRoutes
    from millstream.pipelines.progress import display
    from millstream.pipelines.runner import Runner
    from millstream.pipelines.spec.load import load_pipelines

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("py4j").setLevel(logging.ERROR)
    exposition = Exposition()
    observer: Observer = PipelineMetrics(exposition.registry)
    runner = Runner(load_pipelines(files), once=once, master=master, observer=observer)
    routes = PipelineRoutes(runner)
    web = application(exposition, health=routes.health, ready=routes.ready, routes=routes.routes())
    server = HttpServer(web, port=http_port) if http_port else None
    try:
        if server is not None:
            server.start()
        with runner, display(quiet=quiet) as show:
            # After Spark has started: it installs a handler of its own.
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: runner.ask_to_stop())
            fine = runner.wait(show)
            ended = runner.statuses()
    finally:
        if server is not None:
            server.stop()
    _farewell(runner, ended)
    if not fine:
        raise typer.Exit(FAILED)


def _farewell(runner: Runner, ended: list[Any]) -> None:
    for status in ended:
        color = "red" if status.state == "failed" else None
        typer.secho(f"{status.name}: {status.state}, last batch {status.batch}", fg=color, err=True)
        error = runner.runs[status.name].error
        if status.state == "failed" and error is not None:
            typer.secho(f"  {type(error).__name__}: {printable(str(error)[:2000])}", fg="red", err=True)


@app.command()
def status(
    file: File,
    http_port: Annotated[int, typer.Option("--http-port", help="Where it would answer, if it runs.")] = 9000,
    output: Output = OutputKind.table,
) -> None:
    """How the pipeline stands: live where it runs, else from its checkpoint."""
    from millstream.pipelines.checkpoint import Checkpoint

    [made] = _plans([file])
    live = _live(made.pipeline.name, http_port)
    checkpoint = Checkpoint(made.pipeline.checkpoint_path)
    started = checkpoint.owned(made)
    shown = {
        "pipeline": made.pipeline.name,
        "state": live["state"] if live else "not running" if started else "never started",
        "last committed batch": checkpoint.last_committed(),
        "batch to be replayed": checkpoint.in_flight(),
        "checkpoint": str(checkpoint.path),
        **{f"batches waiting for {sink}": count for sink, count in checkpoint.waiting().items() if count},
        **(_lively(live) if live else {}),
    }
    if output is OutputKind.json:
        as_json(shown | ({"progress": live["progress"]} if live else {}))
    else:
        table(["what", "how"], [[name, value if value is None else str(value)] for name, value in shown.items()])


def _lively(live: dict[str, Any]) -> dict[str, Any]:
    """What only a running pipeline can say. Its source may not know how far it is behind."""
    progress = live["progress"]
    numbers = {"rows/s": "processed_rows_per_second", "lag": "lag", "batch ms": "batch_ms"}
    shown = {label: progress[name] for label, name in numbers.items() if progress.get(name) is not None}
    return shown | {f"sink {name}": state for name, state in live["sinks"].items()}


def _live(name: str, port: int) -> dict[str, Any] | None:
    from urllib.error import URLError
    from urllib.parse import quote
    from urllib.request import urlopen

    try:
        with urlopen(f"http://127.0.0.1:{port}/pipelines/{quote(name)}", timeout=2) as answer:
            found = json.load(answer)
            # Another program may listen there, and answer whatever it likes.
            return found if isinstance(found, dict) and {"state", "progress", "sinks"} <= found.keys() else None
    except (URLError, OSError, ValueError):
        return None


@app.command()
def checkpoints(
    file: File,
    last: Annotated[int, typer.Option(help="How many batches.", min=1)] = 20,
    output: Output = OutputKind.table,
) -> None:
    """The last batches, as Spark's logs have them: when planned, when committed, up to where."""
    from dataclasses import asdict
    from datetime import UTC, datetime

    from millstream.pipelines.checkpoint import Checkpoint

    [made] = _plans([file])
    checkpoint = Checkpoint(made.pipeline.checkpoint_path)
    batches = checkpoint.batches(last) if checkpoint.owned(made) else []
    if output is OutputKind.json:
        as_json([asdict(batch) for batch in batches])
        return

    def when(ms: int | None) -> str | None:
        return (
            None if ms is None else datetime.fromtimestamp(ms / 1000, UTC).isoformat(sep=" ", timespec="milliseconds")
        )

    rows = [[b.id, when(b.planned_ms), when(b.committed_ms), json.dumps(b.offsets)[:200]] for b in batches]
    table(["batch", "planned", "committed", "offsets"], rows)


@app.command()
def reset(file: File, yes: Yes = False) -> None:
    """Forget how far the pipeline has come. What its sinks have stays; what waits on disk for them is lost."""
    from millstream.pipelines.checkpoint import Checkpoint

    [made] = _plans([file])
    checkpoint = Checkpoint(made.pipeline.checkpoint_path)
    if checkpoint.owned(made):
        waiting = sum(checkpoint.waiting().values())
        typer.echo(
            f"checkpoint {checkpoint.path}: last batch {checkpoint.last_committed()}, {waiting} batches waiting on disk"
        )
        confirm("Remove it? The next start reads from the source's beginning, and writes everything again.", yes=yes)
    checkpoint.reset(made)
    typer.secho("removed", fg="green")


@app.command()
def replay(
    file: File,
    limit: Annotated[int, typer.Option(help="How many dead letters at most.", min=1)] = 10_000,
    master: Annotated[str | None, typer.Option("--master", help="Spark's master.")] = None,
) -> None:
    """Send the pipeline's dead letters through it again, from the stage that failed on."""
    from millstream.pipelines.replay import replay as send_again
    from millstream.pipelines.session import hide_secrets, start_session

    plans = _plans([file])
    addresses = hide_secrets(plans)
    session = start_session(plans, addresses, master)
    try:
        done = send_again(session, plans[0], limit=limit, addresses=addresses)
    finally:
        session.stop()
    typer.echo(f"delivered {done.delivered}, failed again {done.failed_again}")
    if done.failed_again:
        raise typer.Exit(FAILED)
