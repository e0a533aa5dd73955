"""``millstream pipeline``: validate, plan, run, look at and reset pipelines."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millstream.cli.exit_codes import FAILED
from millstream.cli.options import Output, OutputKind, Yes
from millstream.cli.show import as_json, confirm, table
from millstream.errors import InvalidArgument
from millstream.observe import printable

if TYPE_CHECKING:
    from millstream.pipelines import PipelinePlan, Runner

app = typer.Typer()

Files = Annotated[list[Path], typer.Argument(help="YAML files, one pipeline each.", show_default=False)]
File = Annotated[Path, typer.Argument(help="The pipeline's YAML file.", show_default=False)]
Http = Annotated[int, typer.Option("--http-port", help="Metrics and control on this port; 0: none.")]
HttpHost = Annotated[str, typer.Option("--http-host", help="The address of that port; a token is a must off loopback.")]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--http-token-file",
        help="A file with the token that every request must bring; or set MILLSTREAM_HTTP_TOKEN.",
        show_default=False,
    ),
]


def _plans(files: list[Path]) -> list[PipelinePlan]:
    from millstream.pipelines import load_pipelines, make_plan

    return [make_plan(pipeline) for pipeline in load_pipelines(files)]


@app.command()
def validate(files: Files) -> None:
    """Check the files, and say everything that is wrong with them; nothing is started."""
    for made in _plans(files):
        typer.secho(f"{made.pipeline.name}: fine", fg="green")


@app.command()
def schema() -> None:
    """Print the JSON schema of a pipeline, for editors."""
    from millstream.pipelines import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))


@app.command()
def plan(files: Files, output: Output = OutputKind.table) -> None:
    """Show what would run where, how rows are told apart, and whether the checkpoint fits."""
    from millstream.pipelines import Checkpoint, CheckpointRefused, describe

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
    http_host: HttpHost = "127.0.0.1",
    token_file: TokenFile = None,
    stay: Annotated[
        bool, typer.Option("--stay", help="Go on answering when all have ended, so that one can be started again.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress display.")] = False,
) -> None:
    """Run pipelines in one Spark session until they end or SIGTERM comes; then stop after the current batch."""
    import logging

    from millstream.model import Observer
    from millstream.observe import Exposition, HttpServer, PipelineMetrics, PipelineRoutes, application
    from millstream.pipelines import Runner, display, load_pipelines

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("py4j").setLevel(logging.ERROR)
    exposition = Exposition()
    observer: Observer = PipelineMetrics(exposition.registry)
    if stay and not http_port:
        raise InvalidArgument("--stay", "--http-port 0", "a port: nobody could start a pipeline again without one")
    runner = Runner(load_pipelines(files), once=once, master=master, stay=stay, observer=observer)
    routes = PipelineRoutes(runner)
    token = _token(token_file)
    checks = {"health": routes.health, "ready": routes.ready}
    web = application(exposition, **checks, routes=routes.routes(), host=http_host, token=token)
    server = HttpServer(web, host=http_host, port=http_port, token=token) if http_port else None
    try:
        if server is not None:
            server.start()
        with runner, display(quiet=quiet) as show:
            # After Spark has started: it installs a handler of its own.
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: runner.ask_to_stop())
            if server is not None:
                runner.announce(server.url)
            fine = runner.wait(show)
            ended = runner.statuses()
    finally:
        if server is not None:
            server.stop()
    _farewell(runner, ended)
    if not fine:
        raise typer.Exit(FAILED)


def _token(file: Path | None) -> str | None:
    """Never on the command line, where everybody on the machine could read it."""
    if file is None:
        return os.environ.get("MILLSTREAM_HTTP_TOKEN") or None
    try:
        token = file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as problem:
        raise InvalidArgument("--http-token-file", str(file), f"a file that can be read ({problem})") from problem
    if not token:
        raise InvalidArgument("--http-token-file", str(file), "a file that holds a token")
    return token


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
    http_port: Annotated[
        int | None, typer.Option("--http-port", help="Where it answers, where its checkpoint does not say.")
    ] = None,
    token_file: TokenFile = None,
    output: Output = OutputKind.table,
) -> None:
    """How the pipeline stands: live where it runs, on whatever port; else from its checkpoint."""
    from dataclasses import asdict

    from millstream.pipelines import Checkpoint, at_rest

    [made] = _plans([file])
    checkpoint = Checkpoint(made.pipeline.checkpoint_path)
    url = f"http://127.0.0.1:{http_port}" if http_port is not None else checkpoint.answers_at()
    found = (_live(made.pipeline.name, url, _token(token_file)) if url else None) or asdict(at_rest(made, checkpoint))
    if output is OutputKind.json:
        as_json(found)
    else:
        lines = _in_words(found)
        table(["what", "how"], [[name, value if value is None else str(value)] for name, value in lines.items()])


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
        **{f"sink {name}": state for name, state in found["sinks"].items() if state != "unknown"},
        **{f"batches waiting for {name}": count for name, count in found["waiting"].items() if count},
    }


def _live(name: str, url: str, token: str | None) -> dict[str, Any] | None:
    """What the process says that runs the pipeline; None where none answers, or another program does."""
    from urllib.error import HTTPError, URLError
    from urllib.parse import quote
    from urllib.request import Request, urlopen

    from millstream.pipelines import PipelineStatus

    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        with urlopen(Request(f"{url}/pipelines/{quote(name)}", headers=headers), timeout=2) as answer:  # noqa: S310
            found = json.load(answer)
            return found if isinstance(found, dict) and set(PipelineStatus.__slots__) <= found.keys() else None
    except HTTPError as problem:
        if problem.code == 401:
            typer.secho(f"{url} wants its token: --http-token-file, or MILLSTREAM_HTTP_TOKEN", fg="yellow", err=True)
        return None
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

    from millstream.pipelines import Checkpoint

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
    from millstream.pipelines import Checkpoint

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
    left = made.pipeline.spec.source.leftover(made.pipeline.name)
    if left is not None:
        typer.echo(left.what)
        if yes or typer.confirm("Remove that, too?"):
            left.remove()
            typer.secho("removed", fg="green")


@app.command()
def replay_dead_letters(
    file: File,
    limit: Annotated[int, typer.Option(help="How many dead letters at most.", min=1)] = 10_000,
    master: Annotated[str | None, typer.Option("--master", help="Spark's master.")] = None,
) -> None:
    """Send the pipeline's dead letters through it again, from the stage that failed on."""
    from millstream.pipelines import Problem, SecretFiles, SpecRefused, start_session, unreachable, wanted_master
    from millstream.pipelines import replay_dead_letters as send_again

    plans = _plans([file])
    problems = [
        Problem(str(file), 0, where, why)
        for where, why in unreachable(plans[0].addresses(), wanted_master(plans, master))
    ]
    if problems:
        raise SpecRefused(problems)
    secrets = SecretFiles()
    session = start_session(plans, master)
    try:
        done = send_again(session, plans[0], limit=limit, secrets=secrets)
    finally:
        session.stop()
        secrets.close()
    typer.echo(f"delivered {done.delivered}, failed again {done.failed_again}")
    if done.failed_again:
        raise typer.Exit(FAILED)
