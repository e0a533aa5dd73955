"""``millstream pipeline``: validate, plan, run, inspect and reset pipelines."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millstream.cli import pipeline_status, show
from millstream.cli.dashboard import PORT, DashboardPort, WithDashboard, run_dashboard
from millstream.cli.main import FAILED, TAKEN, sentence
from millstream.cli.pipeline_status import File, Files, TokenFile, missing_parts, need_spark, plans_of, token_in
from millstream.cli.run import require_tracing
from millstream.cli.show import Output, OutputKind, Yes
from millstream.errors import InvalidArgument, MillstreamError
from millstream.observe.format import count_of, harmless, printable
from millstream.observe.stderr_handler import StderrHandler

if TYPE_CHECKING:
    from millstream.pipelines import PipelinePlan, Runner
    from millstream.pipelines.status import Tally

app = typer.Typer()

_FORCE_S = 30.0
"""Time for Spark's shutdown after --stop-timeout; then the process is terminated."""

Http = Annotated[int, typer.Option("--http-port", help="Port for metrics and control; 0 disables it.")]
HttpHost = Annotated[
    str, typer.Option("--http-host", help="Address of that port; other addresses than loopback require a token.")
]

app.command("ls")(pipeline_status.list_pipelines)
app.command("status")(pipeline_status.status)
app.command("checkpoints")(pipeline_status.checkpoints)


@app.command()
def validate(files: Files, output: Output = OutputKind.table) -> None:
    """Check the files, with their functions and SQL, and report all errors; nothing is run."""
    from millstream.pipelines.session import check_parts

    plans = plans_of(files)
    check_parts(plans)
    warnings = list(missing_parts(plans))
    items = [{"pipeline": made.pipeline.name, "warnings": warnings} for made in plans]
    if output is OutputKind.json:
        show.as_json(items)
        return
    for item in items:
        typer.secho(f"{item['pipeline']}: valid", fg="green")
    for warning in warnings:
        show.warning(f"warning: {warning}")


@app.command()
def schema() -> None:
    """Print the JSON schema of a pipeline, for editors."""
    from millstream.pipelines import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))


@app.command()
def plan(files: Files, output: Output = OutputKind.table) -> None:
    """Show what would run where, how rows are identified, and whether the checkpoint fits; if not, exits with 1."""
    from millstream.pipelines.plan import describe

    items: list[dict[str, Any]] = []
    for made in plans_of(files):
        changes = _checkpoint_lines(made)
        parts = [{"part": part, "how": how, "fits": None} for part, how in describe(made)] + changes
        fits = all(line["fits"] for line in changes)
        items.append({"pipeline": made.pipeline.name, "fits": fits, "plan": parts})
    if output is OutputKind.json:
        show.as_json(items)
    else:
        for item in items:
            typer.secho(item["pipeline"], italic=True)
            for line in item["plan"]:
                _print_part(line, max(len(str(part["part"])) for part in item["plan"]))
    if not all(item["fits"] for item in items):
        raise typer.Exit(FAILED)


def _checkpoint_lines(made: PipelinePlan) -> list[dict[str, Any]]:
    """List what has changed since the checkpoint was created, and whether the checkpoint still fits."""
    from millstream.pipelines import Checkpoint, CheckpointRefused

    checkpoint = Checkpoint.of(made.pipeline)
    try:
        verdicts = checkpoint.verdicts(made) if checkpoint.owned(made) else []
    except CheckpointRefused as error:
        return [{"part": "checkpoint", "how": why, "fits": False} for why in error.reasons]
    return [{"part": f"changed: {change.part}", "how": change.why, "fits": change.compatible} for change in verdicts]


def _print_part(line: dict[str, Any], widest: int) -> None:
    verdict = {None: "", True: "fits: ", False: "DOES NOT FIT: "}[line["fits"]]
    lines = show.hanging(f"{printable(line['part']):<{widest}}  ", verdict + printable(line["how"]))
    typer.secho("\n".join(lines), fg="red" if line["fits"] is False else None)


@app.command()
def run(
    files: Files,
    once: Annotated[bool, typer.Option("--once", help="Process what is available now, and exit.")] = False,
    master: Annotated[str | None, typer.Option("--master", help="Spark's master; overrides the files.")] = None,
    http_port: Http = 9000,
    http_host: HttpHost = "127.0.0.1",
    token_file: TokenFile = None,
    stay: Annotated[
        bool,
        typer.Option("--stay", help="Keep serving HTTP after all pipelines ended, so that they can be started again."),
    ] = False,
    stop_timeout: Annotated[
        float, typer.Option("--stop-timeout", help="Seconds to wait for the current batch when stopping.", min=0)
    ] = 60.0,
    standby: Annotated[
        bool,
        typer.Option("--standby", help="If another process runs a pipeline, wait and take over when its lease ends."),
    ] = False,
    lease: Annotated[
        float,
        typer.Option("--lease", help="Seconds after which a standby may take over from this process.", min=1),
    ] = 15.0,
    dashboard: WithDashboard = False,
    dashboard_port: DashboardPort = PORT,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress display.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Print the output of Spark and Java on the terminal.")
    ] = False,
    log_file: Annotated[
        Path | None,
        typer.Option("--log-file", help="Write the output of Spark and Java to this file.", show_default=False),
    ] = None,
    tracing: Annotated[
        bool,
        typer.Option(
            "--tracing", envvar="MILLSTREAM_TRACING", help="Export an OpenTelemetry span per batch, as OTEL_* say."
        ),
    ] = False,
) -> None:
    """Run pipelines in one Spark session until they end, or until SIGTERM; then stop after the current batch.

    A batch that exceeds --stop-timeout is replayed at the next start. A second signal terminates the process at once.
    """
    plans = plans_of(files)
    need_spark(plans)
    if tracing:
        require_tracing()
    import logging

    from millstream.model import Observer
    from millstream.observe import PipelineMetrics
    from millstream.observe.http import HttpServer, application
    from millstream.observe.metrics import Exposition, combine_observers
    from millstream.observe.pipelines import PipelineRoutes
    from millstream.pipelines import Runner, load_pipelines
    from millstream.pipelines.errors import LeaseLost
    from millstream.pipelines.session import wanted_master
    from millstream.pipelines.status import Tally, display

    logging.basicConfig(handlers=[StderrHandler()], level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("py4j").setLevel(logging.ERROR)
    exposition = Exposition()
    tally = Tally()
    observers: list[Observer] = [PipelineMetrics(exposition.registry), tally]
    stop_tracing = None
    if tracing:
        from millstream.observe.tracing import pipeline_spans, start_sdk

        stop_tracing = start_sdk()
        observers.append(pipeline_spans())
    if stay and not http_port:
        raise InvalidArgument("--stay", "--http-port 0", "a port: without one, no pipeline can be started again")
    if dashboard and not http_port:
        raise InvalidArgument("--dashboard", "--http-port 0", "a port, through which the dashboard reads the pipelines")
    spark_log = None if verbose else log_file or _temporary_log()
    runner = Runner(
        load_pipelines(files),
        once=once,
        master=master,
        stay=stay,
        observer=combine_observers(observers),
        spark_log=spark_log,
        say=(lambda line: None) if quiet else (lambda line: typer.secho(line, dim=True, err=True)),
        stop_timeout_s=stop_timeout,
        end_exhausted=True,
        standby=standby,
        lease_s=lease,
    )

    def give_up() -> None:
        runner.abandon()
        if log_file is None and spark_log is not None and not signals.asked:
            spark_log.unlink(missing_ok=True)  # Spark had only been starting

    signals = StopSignals(give_up, force_after_s=stop_timeout + _FORCE_S)
    signals.install()
    routes = PipelineRoutes(runner)
    token = token_in(token_file)
    checks = {"health": routes.health, "ready": routes.ready}
    web = application(exposition, **checks, routes=routes.routes(), host=http_host, token=token)
    server = HttpServer(web, host=http_host, port=http_port, token=token) if http_port else None
    try:
        if server is not None:
            server.start()
        with ExitStack() as stack, runner, display(quiet=quiet) as show:
            if dashboard and server is not None:
                at = stack.enter_context(run_dashboard(_streams_of(plans), [server.url], token, port=dashboard_port))
                typer.echo(f"millstream: the dashboard is at {at}", err=True)
            signals.stop_gracefully(runner.ask_to_stop)
            if server is not None:
                runner.announce(server.url)
            tally.begin()
            succeeded = runner.wait(show)
            ended = runner.statuses()
    finally:
        signals.restore()
        if server is not None:
            server.stop()
        if stop_tracing is not None:
            stop_tracing()
        if log_file is None and spark_log is not None and not spark_log.stat().st_size:
            spark_log.unlink()  # empty: Spark was never started
    _print_summary(runner, ended, tally)
    if succeeded:
        _keep_classes(wanted_master(runner.plans, master), quiet=quiet)
    if succeeded and log_file is None and spark_log is not None:
        spark_log.unlink(missing_ok=True)
    if not succeeded:
        if spark_log is not None:
            typer.secho(f"The output of Spark and Java is in {spark_log}", fg="red", err=True)
        errors = [run.error for run in runner.runs.values() if run.state == "failed"]
        fenced = [isinstance(error, LeaseLost) for error in errors]
        raise typer.Exit(TAKEN if fenced and all(fenced) else FAILED)


def _keep_classes(master: str, *, quiet: bool) -> None:
    """Create the class archive in the background after the first run."""
    from millstream.pipelines.session import java_path
    from millstream.pipelines.start_cache import start_cache

    cache = start_cache(master, java_path())
    if cache is not None and cache.needs_archive():
        cache.create_in_background()
        if not quiet:
            text = "the next start will be faster: a class archive is being created in the background"
            typer.secho(f"millstream: {text}", dim=True, err=True)


@app.command()
def prepare(output: Output = OutputKind.table) -> None:
    """Create the class archive that lets pipelines start faster, for example when an image is built."""
    need_spark()
    from millstream.pipelines.session import java_path
    from millstream.pipelines.start_cache import start_cache

    cache = start_cache("local[2]", java_path())
    if cache is None:
        allowed = "a cache directory that only this user can write to, no SPARK_HOME, and no other PYSPARK_PYTHON"
        raise InvalidArgument("XDG_CACHE_HOME", os.environ.get("XDG_CACHE_HOME", "~/.cache"), allowed)
    created = False
    if not cache.is_ready():
        typer.secho("running small pipelines to create the class archive; this takes about half a minute ...", err=True)
        created = cache.create()
    message = f"{cache.archive}: {'created' if created else 'up to date, or being created'}"
    show.outcome(output, message, archive=str(cache.archive), created=created)


class StopSignals:
    """Handles SIGTERM and SIGINT for a command that runs Spark.

    Before ``stop_gracefully``, such as while Spark starts, the first signal terminates the process at once. After it,
    the first signal requests a graceful stop, and a second signal or ``force_after_s`` terminates the process. Handlers
    raise no exceptions, because py4j would print a traceback for them.
    """

    def __init__(self, give_up: Callable[[], None], *, force_after_s: float = 0.0) -> None:
        self._give_up = give_up
        self._force_after_s = force_after_s
        self._ask: Callable[[], None] | None = None
        self._before: dict[int, Any] = {}
        self.asked = False

    def install(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._handle)

    def restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def stop_gracefully(self, ask: Callable[[], None]) -> None:
        """From now on, the first signal calls ``ask``, which must not block."""
        self._ask = ask

    def _handle(self, number: int, frame: object) -> None:
        if self._ask is None:
            self._end(number, f"stopped by {signal.Signals(number).name}")
        elif self.asked:
            self._end(number, "terminated by a second signal; the current batch is replayed at the next start")
        else:
            self.asked = True
            self._ask()
            text = "it did not stop in time and was terminated; the current batch is replayed at the next start"
            watchdog = threading.Timer(self._force_after_s, self._end, (number, text))
            watchdog.daemon = True
            watchdog.start()

    def _end(self, number: int, text: str) -> None:
        """Terminate the process without waiting for threads, one of which may hang."""
        cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # the live table has hidden it
        os.write(2, f"{cursor}millstream: {text}\n".encode())
        try:
            self._give_up()
        finally:
            os._exit(128 + number)


def _streams_of(plans: list[PipelinePlan]) -> str:
    """Return the URL of the Redis for the dashboard: the last one in the files, usually that of the last sink."""
    addresses = [address for made in plans for _, address in made.addresses()]
    if not addresses:
        raise InvalidArgument("--dashboard", "no Redis in the files", "a pipeline that reads from or writes to Redis")
    return addresses[-1].url()


def _temporary_log() -> Path:
    """Create a log readable only by this user, since errors may quote rows. It is deleted after success."""
    descriptor, name = tempfile.mkstemp(prefix="millstream-spark-", suffix=".log")
    os.close(descriptor)
    return Path(name)


def _print_summary(runner: Runner, ended: list[Any], tally: Tally) -> None:
    """Print how each pipeline ended, with its counts, and its error without the Java stack frames."""
    from millstream.pipelines.errors import short

    for status in ended:
        color = "red" if status.state == "failed" else None
        resumed = runner.runs[status.name].resumed_after
        continued = "" if resumed is None else f" (continued after batch {resumed} of its checkpoint)"
        typer.secho(f"{status.name}: {status.state}, last batch {status.batch}{continued}", fg=color, err=True)
        target = runner.runs[status.name].plan.dead_letters
        dead_letters = "" if target is None else target.stream
        for line in tally.lines(status.name, list(status.sinks), dead_letters):
            typer.echo(f"  {printable(line)}", err=True)
        error = runner.runs[status.name].error
        if status.state == "failed" and error is not None:
            message = sentence(error, takes_url=False) if isinstance(error, MillstreamError) else short(error, 2000)
            own = "\n".join(line for line in message.splitlines() if not re.match(r"\s*(at |\.\.\. \d+ more)", line))
            show.error(f"  {type(error).__name__}: {harmless(own[:2000])}")


@app.command()
def reset(file: File, yes: Yes = False, output: Output = OutputKind.table) -> None:
    """Remove the pipeline's checkpoint; refused while the pipeline runs.

    Data in the sinks is kept. Batches that wait on disk for sinks are lost.
    """
    from millstream.pipelines import Checkpoint
    from millstream.pipelines.run_lease import refuse_if_held

    [made] = plans_of([file])
    checkpoint = Checkpoint.of(made.pipeline)
    if checkpoint.owned(made):
        checkpoint.must_rest(made)
        refuse_if_held(made, checkpoint)
        waiting = count_of(sum(checkpoint.waiting().values()), "batch", "batches")
        typer.echo(
            f"checkpoint {checkpoint.location}: last batch {checkpoint.last_committed()}, {waiting} waiting for sinks",
            err=True,
        )
        show.confirm(
            "Remove it? The next start reads the source from the beginning and writes all data again.", yes=yes
        )
    checkpoint.reset(made)
    show.outcome(output, "removed", pipeline=made.pipeline.name, checkpoint=checkpoint.location, removed=True)
    leftover = made.pipeline.spec.source.leftover(made.pipeline.name)
    if leftover is not None:
        typer.echo(leftover.description, err=True)
        if yes or typer.confirm("Remove this, too?"):
            leftover.remove()
            typer.secho("removed", fg="green", err=True)
        else:
            typer.echo(f"kept; {leftover.later}", err=True)


@app.command()
def replay_dead_letters(
    file: File,
    limit: Annotated[int, typer.Option(help="Maximum number of dead letters.", min=1)] = 10_000,
    master: Annotated[str | None, typer.Option("--master", help="Spark's master.")] = None,
    output: Output = OutputKind.table,
) -> None:
    """Replay the pipeline's dead letters, starting at the stage that failed."""
    from millstream.pipelines import SpecRefused
    from millstream.pipelines.dead_letters import replay_dead_letters as replay
    from millstream.pipelines.errors import Problem
    from millstream.pipelines.redis_address import SecretFiles, unreachable
    from millstream.pipelines.session import kill_java, start_session, wanted_master

    plans = plans_of([file])
    need_spark(plans)
    problems = [
        Problem(str(file), 0, where, why)
        for where, why in unreachable(plans[0].addresses(), wanted_master(plans, master))
    ]
    if problems:
        raise SpecRefused(problems)
    secrets, spark_log = SecretFiles(), _temporary_log()

    def give_up() -> None:
        secrets.close()
        kill_java()
        spark_log.unlink(missing_ok=True)

    signals = StopSignals(give_up)
    signals.install()
    typer.secho(f"starting Spark on {wanted_master(plans, master)}; this takes some seconds ...", dim=True, err=True)
    session = start_session(plans, master, log=spark_log)
    try:
        done = replay(session, plans[0], limit=limit, secrets=secrets)
    finally:
        session.stop()
        secrets.close()
        signals.restore()
    spark_log.unlink(missing_ok=True)
    for why, letters in done.kept.items():
        typer.secho(f"{count_of(letters, 'dead letter', 'dead letters')} kept: {why}", err=True)
    failed_again = count_of(done.failed_again, "dead letter", "dead letters")
    show.outcome(
        output,
        f"delivered {count_of(done.delivered, 'letter', 'letters')}; {failed_again} failed again",
        pipeline=plans[0].pipeline.name,
        delivered=done.delivered,
        failed_again=done.failed_again,
        kept=sum(done.kept.values()),
    )
    if done.failed_again or done.kept:
        raise typer.Exit(FAILED)
