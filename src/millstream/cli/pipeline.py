"""``millstream pipeline``: validate, plan, run, look at and reset pipelines."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millstream.cli import pipeline_status, show
from millstream.cli.dashboard import PORT, Beside, BesidePort, shown
from millstream.cli.main import FAILED
from millstream.cli.pipeline_status import File, Files, TokenFile, missing_parts, need_spark, plans_of, token_in
from millstream.cli.show import Output, OutputKind, Yes
from millstream.errors import InvalidArgument, MillstreamError
from millstream.observe import count_of, harmless, printable

if TYPE_CHECKING:
    from millstream.pipelines import PipelinePlan, Runner, Tally

app = typer.Typer()

Http = Annotated[int, typer.Option("--http-port", help="Metrics and control on this port; 0: none.")]
HttpHost = Annotated[str, typer.Option("--http-host", help="The address of that port; a token is a must off loopback.")]

app.command("ls")(pipeline_status.list_pipelines)
app.command("status")(pipeline_status.status)
app.command("checkpoints")(pipeline_status.checkpoints)


@app.command()
def validate(files: Files, output: Output = OutputKind.table) -> None:
    """Check the files, the functions and the SQL in them, and say everything that is wrong; nothing is run."""
    from millstream.pipelines import check_parts

    plans = plans_of(files)
    check_parts(plans)
    warnings = list(missing_parts(plans))
    items = [{"pipeline": made.pipeline.name, "warnings": warnings} for made in plans]
    if output is OutputKind.json:
        show.as_json(items)
        return
    for item in items:
        typer.secho(f"{item['pipeline']}: fine", fg="green")
    for warning in warnings:
        show.warning(f"warning: {warning}")


@app.command()
def schema() -> None:
    """Print the JSON schema of a pipeline, for editors."""
    from millstream.pipelines import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))


@app.command()
def plan(files: Files, output: Output = OutputKind.table) -> None:
    """Show what would run where, how rows are told apart, and whether the checkpoint fits; exits 1 where not."""
    from millstream.pipelines import describe

    items: list[dict[str, Any]] = []
    for made in plans_of(files):
        refused = _checkpoint_lines(made)
        parts = [{"part": part, "how": how, "fits": None} for part, how in describe(made)] + refused
        fits = all(line["fits"] for line in refused)
        items.append({"pipeline": made.pipeline.name, "fits": fits, "plan": parts})
    if output is OutputKind.json:
        show.as_json(items)
    else:
        for item in items:
            typer.secho(item["pipeline"], italic=True)
            for line in item["plan"]:
                _tell_part(line, max(len(str(each["part"])) for each in item["plan"]))
    if not all(item["fits"] for item in items):
        raise typer.Exit(FAILED)


def _checkpoint_lines(made: PipelinePlan) -> list[dict[str, Any]]:
    """What has changed since the checkpoint was made, and whether that fits it."""
    from millstream.pipelines import Checkpoint, CheckpointRefused

    checkpoint = Checkpoint(made.pipeline.checkpoint_path)
    try:
        verdicts = checkpoint.verdicts(made) if checkpoint.owned(made) else []
    except CheckpointRefused as error:
        return [{"part": "checkpoint", "how": why, "fits": False} for why in error.reasons]
    return [{"part": f"changed: {one.part}", "how": one.why, "fits": one.compatible} for one in verdicts]


def _tell_part(line: dict[str, Any], widest: int) -> None:
    verdict = {None: "", True: "fits: ", False: "DOES NOT FIT: "}[line["fits"]]
    told = show.hanging(f"{printable(line['part']):<{widest}}  ", verdict + printable(line["how"]))
    typer.secho("\n".join(told), fg="red" if line["fits"] is False else None)


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
    dashboard: Beside = False,
    dashboard_port: BesidePort = PORT,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress display.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Let Spark and Java speak on the terminal, too.")] = False,
    log_file: Annotated[
        Path | None, typer.Option("--log-file", help="Keep what Spark and Java say in this file.", show_default=False)
    ] = None,
) -> None:
    """Run pipelines in one Spark session until they end or SIGTERM comes; then stop after the current batch."""
    plans = plans_of(files)
    need_spark(plans)
    import logging

    from millstream.model import Observer
    from millstream.observe import Exposition, HttpServer, PipelineMetrics, PipelineRoutes, application, together
    from millstream.pipelines import Runner, Tally, display, load_pipelines

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("py4j").setLevel(logging.ERROR)
    exposition = Exposition()
    tally = Tally()
    observer: Observer = together([PipelineMetrics(exposition.registry), tally])
    if stay and not http_port:
        raise InvalidArgument("--stay", "--http-port 0", "a port: nobody could start a pipeline again without one")
    if dashboard and not http_port:
        raise InvalidArgument("--dashboard", "--http-port 0", "a port: it asks the pipelines there")
    spark_log = None if verbose else log_file or _temporary_log()
    runner = Runner(
        load_pipelines(files),
        once=once,
        master=master,
        stay=stay,
        observer=observer,
        spark_log=spark_log,
        say=(lambda line: None) if quiet else (lambda line: typer.secho(line, dim=True, err=True)),
    )
    routes = PipelineRoutes(runner)
    token = token_in(token_file)
    checks = {"health": routes.health, "ready": routes.ready}
    web = application(exposition, **checks, routes=routes.routes(), host=http_host, token=token)
    server = HttpServer(web, host=http_host, port=http_port, token=token) if http_port else None
    try:
        if server is not None:
            server.start()
        with ExitStack() as beside, runner, display(quiet=quiet) as show:
            if dashboard and server is not None:
                at = beside.enter_context(shown(_streams_of(plans), [server.url], token, port=dashboard_port))
                typer.echo(f"millstream: the dashboard is at {at}", err=True)
            # After Spark has started: it installs a handler of its own.
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: runner.ask_to_stop())
            if server is not None:
                runner.announce(server.url)
            tally.begin()
            fine = runner.wait(show)
            ended = runner.statuses()
    finally:
        if server is not None:
            server.stop()
        if log_file is None and spark_log is not None and not spark_log.stat().st_size:
            spark_log.unlink()  # nothing was said: Spark was never started
    _farewell(runner, ended, tally)
    if fine and log_file is None and spark_log is not None:
        spark_log.unlink(missing_ok=True)
    if not fine:
        if spark_log is not None:
            typer.secho(f"What Spark and Java said is in {spark_log}", fg="red", err=True)
        raise typer.Exit(FAILED)


def _streams_of(plans: list[PipelinePlan]) -> str:
    """The Redis that the dashboard shows: the last that the files name, where what they produce ends."""
    addresses = [address for made in plans for _, address in made.addresses()]
    if not addresses:
        raise InvalidArgument("--dashboard", "no Redis in the files", "a pipeline that reads from or writes to Redis")
    return addresses[-1].url()


def _temporary_log() -> Path:
    """For this user alone, since errors may quote rows; gone when all ends well."""
    descriptor, name = tempfile.mkstemp(prefix="millstream-spark-", suffix=".log")
    os.close(descriptor)
    return Path(name)


def _farewell(runner: Runner, ended: list[Any], tally: Tally) -> None:
    """How each ended, and what went through it; of an error its own words, without Java's frames."""
    from millstream.pipelines import short

    for status in ended:
        color = "red" if status.state == "failed" else None
        typer.secho(f"{status.name}: {status.state}, last batch {status.batch}", fg=color, err=True)
        for line in tally.lines(status.name, list(status.sinks)):
            typer.echo(f"  {printable(line)}", err=True)
        error = runner.runs[status.name].error
        if status.state == "failed" and error is not None:
            told = str(error) if isinstance(error, MillstreamError) else short(error, 2000)
            own = "\n".join(line for line in told.splitlines() if not re.match(r"\s*(at |\.\.\. \d+ more)", line))
            show.error(f"  {type(error).__name__}: {harmless(own[:2000])}")


@app.command()
def reset(file: File, yes: Yes = False, output: Output = OutputKind.table) -> None:
    """Forget how far the pipeline has come; refused while it runs.

    What its sinks have stays; what waits on disk for them is lost.
    """
    from millstream.pipelines import Checkpoint

    [made] = plans_of([file])
    checkpoint = Checkpoint(made.pipeline.checkpoint_path)
    if checkpoint.owned(made):
        checkpoint.must_rest(made)
        waiting = count_of(sum(checkpoint.waiting().values()), "batch", "batches")
        typer.echo(
            f"checkpoint {checkpoint.path}: last batch {checkpoint.last_committed()}, {waiting} waiting on disk",
            err=True,
        )
        show.confirm(
            "Remove it? The next start reads from the source's beginning, and writes everything again.", yes=yes
        )
    checkpoint.reset(made)
    show.outcome(output, "removed", pipeline=made.pipeline.name, checkpoint=str(checkpoint.path), removed=True)
    left = made.pipeline.spec.source.leftover(made.pipeline.name)
    if left is not None:
        typer.echo(left.what, err=True)
        if yes or typer.confirm("Remove that, too?"):
            left.remove()
            typer.secho("removed", fg="green", err=True)
        else:
            typer.echo(f"kept; {left.later}", err=True)


@app.command()
def replay_dead_letters(
    file: File,
    limit: Annotated[int, typer.Option(help="How many dead letters at most.", min=1)] = 10_000,
    master: Annotated[str | None, typer.Option("--master", help="Spark's master.")] = None,
    output: Output = OutputKind.table,
) -> None:
    """Send the pipeline's dead letters through it again, from the stage that failed on."""
    from millstream.pipelines import Problem, SecretFiles, SpecRefused, start_session, unreachable, wanted_master
    from millstream.pipelines import replay_dead_letters as send_again

    plans = plans_of([file])
    need_spark(plans)
    problems = [
        Problem(str(file), 0, where, why)
        for where, why in unreachable(plans[0].addresses(), wanted_master(plans, master))
    ]
    if problems:
        raise SpecRefused(problems)
    secrets, spark_log = SecretFiles(), _temporary_log()
    typer.secho(f"starting Spark on {wanted_master(plans, master)}; this takes some seconds ...", dim=True, err=True)
    session = start_session(plans, master, log=spark_log)
    try:
        done = send_again(session, plans[0], limit=limit, secrets=secrets)
    finally:
        session.stop()
        secrets.close()
    spark_log.unlink(missing_ok=True)
    again = count_of(done.failed_again, "letter", "letters")
    show.outcome(
        output,
        f"delivered {count_of(done.delivered, 'letter', 'letters')}; {again} failed again",
        pipeline=plans[0].pipeline.name,
        delivered=done.delivered,
        failed_again=done.failed_again,
    )
    if done.failed_again:
        raise typer.Exit(FAILED)
