"""Starts the Spark session of a run, and a separate session inside it for each pipeline. Also the checks before the
start: Java is installed, the checkpoints fit, servers accept the passwords, executors can read them, and ``--once`` can
end.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, TypeVar

from millstream.pipelines.checkpoint import Checkpoint
from millstream.pipelines.errors import (
    AccessRefused,
    CheckpointRefused,
    Problem,
    SparkNotStarted,
    SpecRefused,
    short,
)
from millstream.pipelines.plan import PipelinePlan, Placed
from millstream.pipelines.redis_address import (
    NotAnswering,
    RedisAddress,
    Refusal,
    unreachable,
    without_secret_variables,
)
from millstream.pipelines.spec.part import SECRET_WORDS
from millstream.pipelines.start_cache import start_cache, variables_set
from millstream.storage import InvalidLocation, StorageError, StorageUnavailable

if TYPE_CHECKING:
    from pyspark import SparkConf
    from pyspark.sql import SparkSession

Result = TypeVar("Result")

_MANAGERS = "org.apache.spark.sql.execution.streaming.checkpointing."
_RENAME_MANAGER = _MANAGERS + "FileSystemBasedCheckpointFileManager"
ATOMIC_RENAME_MANAGER = _MANAGERS + "FileContextBasedCheckpointFileManager"
log = logging.getLogger("millstream.pipelines")

OLDEST_JAVA: Final = 17
_INSTALL: Final = "Install it: apt-get install openjdk-17-jre-headless"
_JAVA_STARTS_S: Final = 60.0


def wanted_master(plans: Sequence[PipelinePlan], master: str | None = None) -> str:
    """The Spark master: from the command line, else from the first file that names one, else from the environment, else
    local."""
    specs = [made.pipeline.spec.spark for made in plans]
    return (
        master
        or next((spec.master for spec in specs if spec.master), None)
        or os.environ.get("MILLSTREAM_SPARK_MASTER")
        or next((spec.conf["spark.master"] for spec in specs if "spark.master" in spec.conf), None)
        or "local[*]"
    )


def start_session(plans: Sequence[PipelinePlan], master: str | None = None, *, log: Path | None = None) -> SparkSession:
    """Starts the session; its workers run this interpreter. Settings of the files override the defaults; if several
    files have one setting, the first file wins. ``log``: a file for the output of Spark, Java and the workers; without
    it they write to this process's terminal. Raises SparkNotStarted."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # py4j has no types
    from pyspark.errors import PySparkException

    before = log.stat().st_size if log is not None and log.exists() else 0
    try:
        return _start(plans, master, log)
    except (PySparkException, Py4JError) as error:
        java_error = getattr(error, "java_exception", None)
        why = str(java_error.toString()).splitlines()[0] if java_error is not None else short(error, 300)
        output = _output_since(before, log)
        if "JAVA_GATEWAY_EXITED" in str(error):
            why = _reason_java_ended(output)
        elif "stopped SparkContext" in why:  # this error is a consequence: another thread stopped Spark
            why = first_error(output) or why
        raise SparkNotStarted(why, str(log) if log else None) from error


def _start(plans: Sequence[PipelinePlan], master: str | None, log: Path | None) -> SparkSession:
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.streaming.metricsEnabled": "false",
        "spark.scheduler.mode": "FAIR",
        # Tasks on other hosts receive the segments of a database's log in their input partitions. Spark refuses a task
        # above this size (MiB; 128 by default).
        "spark.rpc.message.maxSize": "1536",
        "spark.sql.streaming.checkpointFileManagerClass": checkpoint_file_manager(plans),
        "spark.redaction.regex": f"(?i){'|'.join(SECRET_WORDS)}",
    }
    for made in reversed(plans):
        settings |= made.pipeline.spec.spark.conf
    settings["spark.master"] = wanted_master(plans, master)
    settings["spark.app.name"] = "millstream " + ", ".join(made.pipeline.name for made in plans)
    # The settings of a builder are on the JVM's command line, which every user of the machine can read. So the JVM
    # starts with the settings that are not secret, and receives the others over its connection.
    public_settings = SparkConf(loadDefaults=False)
    for name, value in settings.items():
        if not any(word in name.lower() for word in SECRET_WORDS):
            public_settings.set(name, value)
    cache = start_cache(settings["spark.master"], java_path())
    starting = variables_set({} if cache is None else cache.environment())
    with without_secret_variables([text for made in plans for text in made.secrets()]), starting:
        if log is None or SparkContext._gateway is not None:
            SparkContext._ensure_initialized(conf=public_settings)
        else:
            with log.open("ab") as file:
                gateway = _gateway(public_settings, file)
            SparkContext._ensure_initialized(gateway=gateway, conf=public_settings)
    builder = SparkSession.builder
    for name, value in settings.items():
        builder = builder.config(name, value)
    with _signal_handler_kept():
        session = builder.getOrCreate()
    session.sparkContext.setLogLevel(os.environ.get("MILLSTREAM_SPARK_LOG", "ERROR"))
    return session


def checkpoint_file_manager(plans: Sequence[PipelinePlan]) -> str:
    """Spark's class for its own checkpoint. All pipelines of a session share it.

    FileContext renames atomically in every store that can, and refuses to replace a file. On a local disk it runs
    stat(1) several times per batch if Hadoop has no native library, 75 ms; there FileSystem renames as atomically.
    """
    in_a_store = any(made.pipeline.checkpoint_is_in_a_store for made in plans)
    return ATOMIC_RENAME_MANAGER if in_a_store else _RENAME_MANAGER


@contextmanager
def _signal_handler_kept() -> Iterator[None]:
    """Restores the caller's SIGINT handler, which pyspark replaces by one that raises inside py4j."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def kill_java() -> None:
    """Kills the JVM that this process has started, if any. For a process that ends without waiting for Spark."""
    pyspark = sys.modules.get("pyspark")
    process = getattr(getattr(getattr(pyspark, "SparkContext", None), "_gateway", None), "proc", None)
    if process is not None:
        with suppress(OSError):
            process.kill()


def _output_since(start: int, log: Path | None, limit: int = 1 << 20) -> str:
    """The output since ``start`` in a log that may contain output of earlier starts; at most ``limit`` bytes."""
    if log is None:
        return ""
    with log.open("rb") as file:
        file.seek(start)
        return file.read(limit).decode(errors="replace")


_LOGGED: Final = re.compile(r"\S+ [\d:]+ (WARN|ERROR) [\w$.]+: (.*)")
_CAUSE: Final = re.compile(r"Caused by: (?:[\w$]+\.)+[\w$]+: (.*)")


def first_error(output: str) -> str | None:
    """The first line of Spark's log that an exception follows, with the cause of the exception; else the first
    error."""
    lines = output.splitlines()
    logged = [(at, match) for at, line in enumerate(lines) if (match := _LOGGED.fullmatch(line))]
    ends = [*(at for at, _ in logged), len(lines)][1:]
    for (at, match), end in zip(logged, ends, strict=True):
        causes = [cause[1] for line in lines[at + 1 : end] if (cause := _CAUSE.fullmatch(line))]
        if causes:
            return f"{match[2]}: {causes[-1]}"[:300]
    return next((match[2][:300] for _, match in logged if match[1] == "ERROR"), None)


def _reason_java_ended(output: str) -> str:
    """The reason for which Java ended: its error and the next line, or else its last line."""
    lines = output.splitlines()[-200:]
    printed = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("at ")]
    error_word = re.compile(r"\berror\b|exception|cannot|could not", re.IGNORECASE)
    first = next((at for at, line in enumerate(printed) if error_word.search(line)), len(printed) - 1)
    return f"Java ended: {': '.join(printed[max(first, 0) : first + 2])[:300] or 'without output'}"


def _gateway(conf: SparkConf | None, output: IO[bytes] | int) -> Any:
    from pyspark.java_gateway import launch_gateway

    popen: dict[str, Any] = {"stdout": output, "stderr": output}
    return launch_gateway(conf, popen)  # type: ignore[no-untyped-call]  # pyspark does not type it


@contextmanager
def parser() -> Iterator[SqlParser]:
    """Spark's parser without a session, to check SQL before anything is started. Its JVM ends with the block."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    gateway = _gateway(None, subprocess.DEVNULL)
    try:
        yield SqlParser(gateway.jvm)
    finally:
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait()


class SqlParser:
    """Reports syntax errors of a query or of a schema. Names of tables and columns are not resolved."""

    def __init__(self, jvm: Any) -> None:
        self._parser = jvm.org.apache.spark.sql.execution.SparkSqlParser()

    def problem_in_query(self, text: str) -> str | None:
        return self._problem(self._parser.parsePlan, text)

    def problem_in_schema(self, text: str) -> str | None:
        return self._problem(self._parser.parseTableSchema, text)

    def _problem(self, parse: Callable[[str], object], text: str) -> str | None:
        from py4j.protocol import Py4JJavaError
        from pyspark.errors import PySparkException

        try:
            parse(text)
        except (Py4JJavaError, PySparkException) as error:  # PySparkException: if a session exists
            message = str(error.java_exception.getMessage()) if isinstance(error, Py4JJavaError) else str(error)
            return next((line for line in message.splitlines() if line.strip()), type(error).__name__)
        return None


def in_session(session: SparkSession, work: Callable[[], Result]) -> Callable[[], Result]:
    """Wraps ``work`` so that another thread can run it with the caller's job properties and with the session active.

    Without the properties, jobs would lose their group and scheduling pool. Without an active session, Spark does not
    find Python data sources in that thread.
    """
    from pyspark import inheritable_thread_target

    def run() -> Result:
        activate(session)
        return work()

    made: Any = inheritable_thread_target(session)(run)
    return made  # type: ignore[no-any-return]  # pyspark does not type its decorator


def activate(session: SparkSession) -> None:
    jvm: Any = session._jvm
    jvm.org.apache.spark.sql.classic.SparkSession.setActiveSession(session._jsparkSession)


def check_before(plans: Sequence[PipelinePlan], *, once: bool, master: str) -> dict[str, dict[str, str]]:
    """Raises one SpecRefused with all problems that prevent a start; AccessRefused if all of them are refused logins.

    A server that does not answer is no such problem, because it may answer later. An optional sink that refuses is none
    either, because the other sinks continue without it. Returns these sinks by pipeline, each as ``not answering`` or
    ``refused``.
    """
    problems: list[Problem] = []
    denied: list[Problem] = []
    unready: dict[str, dict[str, str]] = {}
    for made in plans:
        name = made.pipeline.name
        problems += [Problem(name, 0, where, why) for where, why in _problems(made, once, master)]
        out_of_reach = [Problem(name, 0, where, why) for where, why in unreachable(made.addresses(), master)]
        problems += out_of_reach
        if not out_of_reach:
            answers = _ask_servers(made)
            for where, refusal in answers.refused:
                (denied if refusal.denied else problems).append(Problem(name, 0, where, refusal.why))
            unready[name] = answers.unready
    if denied and not problems:
        raise AccessRefused(denied)
    if problems or denied:
        raise SpecRefused([*problems, *denied])
    return unready


def check_stores(plans: Sequence[PipelinePlan], master: str) -> None:
    """The checks of ``check_before`` for checkpoints in a store, which are reached through the session's JVM. Raises
    SpecRefused, and StorageUnavailable if a store does not answer: it may come back, as a server may."""
    problems = [
        Problem(made.pipeline.name, 0, where, why)
        for made in plans
        if made.pipeline.checkpoint_is_in_a_store
        for where, why in _checkpoint_problems(made, master)
    ]
    if problems:
        raise SpecRefused(problems)


def check_parts(plans: Sequence[PipelinePlan]) -> None:
    """Checks that `validate` makes: functions that cannot be imported and, if Spark can run, SQL that cannot be parsed.
    Raises SpecRefused."""
    problems = [Problem(made.pipeline.name, 0, where, why) for made in plans for where, why in _part_problems(made)]
    has_sql = any(placed.processor.has_sql for made in plans for placed in _placed(made))
    if has_sql and find_spec("pyspark") is not None and java_problem() is None:
        with parser() as spark:
            problems += _sql_problems(plans, spark)
    if problems:
        raise SpecRefused(problems)


def check_sql(plans: Sequence[PipelinePlan], spark: SqlParser) -> None:
    """Checks all SQL before the first batch runs it. Raises SpecRefused."""
    if problems := _sql_problems(plans, spark):
        raise SpecRefused(problems)


def _sql_problems(plans: Sequence[PipelinePlan], spark: SqlParser) -> list[Problem]:
    return [
        Problem(made.pipeline.name, 0, placed.name, why)
        for made in plans
        for placed in _placed(made)
        for why in placed.processor.problems_in_sql(spark)
    ]


def _placed(made: PipelinePlan) -> Sequence[Placed]:
    return (*made.streaming, *made.per_batch)


def _part_problems(made: PipelinePlan) -> Iterator[tuple[str, str]]:
    for placed in _placed(made):
        for why in placed.processor.problems_before_start():
            yield placed.name, why


def _problems(made: PipelinePlan, once: bool, master: str) -> Iterator[tuple[str, str]]:
    if once and made.pipeline.spec.source.endless():
        yield "source", "the generator never ends: --once needs rows or rate"
    if not made.pipeline.checkpoint_is_in_a_store:
        yield from _checkpoint_problems(made, master)
    yield from _part_problems(made)


def _checkpoint_problems(made: PipelinePlan, master: str) -> Iterator[tuple[str, str]]:
    """Problems of the checkpoint and of the source. The source must know whether there is a checkpoint."""
    name, source = made.pipeline.name, made.pipeline.spec.source
    checkpoint = Checkpoint.of(made.pipeline)
    try:
        for verdict in checkpoint.check(made):
            log.warning("%s: the spec has changed: %s: %s", name, verdict.part, verdict.why)
        begun = checkpoint.last_planned() is not None
    except StorageUnavailable:
        raise
    except (CheckpointRefused, StorageError, InvalidLocation) as error:
        yield "checkpoint", str(error)
        return
    for why in source.problems_before_start(name, begun=begun, master=master):
        yield "source", why


@dataclass(frozen=True, slots=True)
class _ServerAnswers:
    """The answers of the servers that a spec names: which parts were refused, and which sinks cannot be written to
    yet."""

    refused: list[tuple[str, Refusal]] = field(default_factory=list)
    unready: dict[str, str] = field(default_factory=dict)


def _ask_servers(made: PipelinePlan) -> _ServerAnswers:
    """Asks each server once, even if several parts of the spec name it."""
    asked: dict[RedisAddress, Refusal | NotAnswering | None] = {}
    answers = _ServerAnswers()
    optional = {f"sink {sink.config.id}" for sink in made.optional}
    for where, address in made.addresses():
        if address not in asked:
            try:
                asked[address] = address.refusal()
            except NotAnswering as away:
                asked[address] = away
                log.warning(
                    "%s: %s", made.pipeline.name, _outage_message(made, where, address, away, where in optional)
                )
        answer, sink = asked[address], where.removeprefix("sink ")
        if isinstance(answer, NotAnswering):
            if where != sink:
                answers.unready[sink] = "not answering"
        elif answer is not None and where in optional:
            log.error(
                "%s: %s refuses the pipeline; it is optional, so the pipeline starts without it: %s",
                made.pipeline.name,
                where,
                answer.why,
            )
            answers.unready[sink] = "refused"
        elif answer is not None:
            answers.refused.append((where, answer))
    return answers


def _outage_message(made: PipelinePlan, where: str, address: RedisAddress, away: NotAnswering, optional: bool) -> str:
    """What happens while a server does not answer: the pipeline waits for required parts, and starts without others."""
    if optional:
        return f"{where} at {address} does not answer ({away}); it is optional: its batches wait on disk until it does"
    deadline = made.pipeline.spec.retry.deadline
    until = "until it answers" if deadline == "none" else f"for {deadline / 1000:g} s, then the pipeline fails"
    return f"{where} at {address} does not answer ({away}). It is retried {until} (retry.deadline)"


def java_path() -> str | None:
    """The path of the Java that Spark's launcher script runs."""
    home = os.environ.get("JAVA_HOME")
    return str(Path(home, "bin", "java")) if home else shutil.which("java")


def java_problem(*, trust_release_file: bool = False) -> str | None:
    """Why Spark cannot run on the Java of its launcher script, and what to do; None if it can.

    ``trust_release_file``: read the version from the file that Java installations have for that, instead of starting
    Java, which takes up to half a second.
    """
    home = os.environ.get("JAVA_HOME")
    java = java_path()
    if java is None:
        return f"Spark needs Java {OLDEST_JAVA} or newer, and no Java is installed. {_INSTALL}"
    if not os.access(java, os.X_OK):
        return f"JAVA_HOME is {home}, which has no bin/java. Unset it, or set it to a Java {OLDEST_JAVA} or newer."
    if trust_release_file and _version_in_release_file(Path(java)) >= OLDEST_JAVA:
        return None
    remedy = "Set JAVA_HOME to another Java." if home else f"{_INSTALL}, or set JAVA_HOME to another Java."
    try:
        asked = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=_JAVA_STARTS_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{java} does not start ({error}), and Spark needs it. {remedy}"
    lines = [line.strip() for line in (asked.stderr + asked.stdout).splitlines() if not line.startswith("Picked up ")]
    output = next(filter(None, lines), "no output")
    version = re.search(r'version "(?:1\.)?(\d+)', asked.stderr + asked.stdout)
    if asked.returncode or version is None:
        return f"{java} does not start (exit code {asked.returncode}: {output[:200]}), and Spark needs it. {remedy}"
    if int(version[1]) < OLDEST_JAVA:
        return f"Spark needs Java {OLDEST_JAVA} or newer, and {java} is {version[1]}. {remedy}"
    return None


def _version_in_release_file(java: Path) -> int:
    """The major version; 0 if the installation has no such file."""
    try:
        text = (java.resolve().parent.parent / "release").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return 0
    version = re.search(r'^JAVA_VERSION="(\d+)', text, re.MULTILINE)
    return int(version[1]) if version else 0
