"""One Spark session for all pipelines of a run, and a session of its own within it for each of them; and the last look
before it starts: there is a Java, the checkpoints fit, passwords are right and can reach their readers, and ``--once``
can end.
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
from millstream.storage import InvalidLocation, StorageError

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
    """Where Spark runs: as the command line says, else the first file that does, else the environment, else here."""
    specs = [made.pipeline.spec.spark for made in plans]
    return (
        master
        or next((spec.master for spec in specs if spec.master), None)
        or os.environ.get("MILLSTREAM_SPARK_MASTER")
        or next((spec.conf["spark.master"] for spec in specs if "spark.master" in spec.conf), None)
        or "local[*]"
    )


def start_session(plans: Sequence[PipelinePlan], master: str | None = None, *, log: Path | None = None) -> SparkSession:
    """Workers run this interpreter. The files' own settings win, and of several files the first that gives one.
    ``log``: a file for what Spark, Java and the workers say; without one they speak on this process's terminal.
    Raises SparkNotStarted."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # py4j has no types
    from pyspark.errors import PySparkException

    before = log.stat().st_size if log is not None and log.exists() else 0
    try:
        return _start(plans, master, log)
    except (PySparkException, Py4JError) as error:
        thrown = getattr(error, "java_exception", None)
        why = str(thrown.toString()).splitlines()[0] if thrown is not None else short(error, 300)
        output = _said_since(before, log)
        if "JAVA_GATEWAY_EXITED" in str(error):
            why = _last_words(output)
        elif "stopped SparkContext" in why:  # it gave up in a thread of its own: that was the reason, this came of it
            why = first_trouble(output) or why
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
    """pyspark installs a handler of its own for SIGINT, which raises inside py4j; the caller's stays."""
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


def _said_since(place: int, log: Path | None, limit: int = 1 << 20) -> str:
    """What this start wrote into a log that may hold others before it."""
    if log is None:
        return ""
    with log.open("rb") as file:
        file.seek(place)
        return file.read(limit).decode(errors="replace")


_LOGGED: Final = re.compile(r"\S+ [\d:]+ (WARN|ERROR) [\w$.]+: (.*)")
_CAUSE: Final = re.compile(r"Caused by: (?:[\w$]+\.)+[\w$]+: (.*)")


def first_trouble(output: str) -> str | None:
    """The first line of Spark's log that comes with an exception, and the cause under it; else its first error."""
    lines = output.splitlines()
    logged = [(at, match) for at, line in enumerate(lines) if (match := _LOGGED.fullmatch(line))]
    ends = [*(at for at, _ in logged), len(lines)][1:]
    for (at, match), end in zip(logged, ends, strict=True):
        causes = [cause[1] for line in lines[at + 1 : end] if (cause := _CAUSE.fullmatch(line))]
        if causes:
            return f"{match[2]}: {causes[-1]}"[:300]
    return next((match[2][:300] for _, match in logged if match[1] == "ERROR"), None)


def _last_words(output: str) -> str:
    """Of a Java that ended: its error and the line behind it, or else the last that it said."""
    lines = output.splitlines()[-200:]
    spoken = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("at ")]
    wrong = re.compile(r"\berror\b|exception|cannot|could not", re.IGNORECASE)
    first = next((at for at, line in enumerate(spoken) if wrong.search(line)), len(spoken) - 1)
    return f"Java ended: {': '.join(spoken[max(first, 0) : first + 2])[:300] or 'without a word'}"


def _gateway(conf: SparkConf | None, output: IO[bytes] | int) -> Any:
    from pyspark.java_gateway import launch_gateway

    popen: dict[str, Any] = {"stdout": output, "stderr": output}
    return launch_gateway(conf, popen)  # type: ignore[no-untyped-call]  # pyspark does not type it


@contextmanager
def parser() -> Iterator[SqlParser]:
    """Spark's parser without a session, in a Java that ends with the block: to check SQL before anything is started."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    gateway = _gateway(None, subprocess.DEVNULL)
    try:
        yield SqlParser(gateway.jvm)
    finally:
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait()


class SqlParser:
    """Says what is wrong with a query or with the fields of a schema; nothing is looked up."""

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
        except (Py4JJavaError, PySparkException) as error:  # the second where a session translates errors
            message = str(error.java_exception.getMessage()) if isinstance(error, Py4JJavaError) else str(error)
            return next((line for line in message.splitlines() if line.strip()), type(error).__name__)
        return None


def in_session(session: SparkSession, work: Callable[[], Result]) -> Callable[[], Result]:
    """``work`` for a thread of its own: with the caller's job properties, and with the session active in it.

    Without the first, jobs would lose their group and scheduling pool; without the second, Spark does not find
    Python data sources from there.
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
    """Raises one SpecRefused with everything that stands in the way, AccessRefused where all of it is a refused login.

    A server that does not answer may come back, so it is no problem; nor is an optional sink that refuses, since the
    others go on without it. Returns such sinks by pipeline, each as ``not answering`` or ``refused``.
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
    """What ``check_before`` checks, for checkpoints in a store, which are reached through the session's JVM. Raises
    SpecRefused."""
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
    """Before the first batch would find it. Raises SpecRefused."""
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
    """Of the checkpoint, and of the source, which may need to know whether there is one."""
    name, source = made.pipeline.name, made.pipeline.spec.source
    checkpoint = Checkpoint.of(made.pipeline)
    try:
        for verdict in checkpoint.check(made):
            log.warning("%s: the spec has changed: %s: %s", name, verdict.part, verdict.why)
        begun = checkpoint.last_planned() is not None
    except (CheckpointRefused, StorageError, InvalidLocation) as error:
        yield "checkpoint", str(error)
        return
    for why in source.problems_before_start(name, begun=begun, master=master):
        yield "source", why


@dataclass(frozen=True, slots=True)
class _Answers:
    """Of the servers that a spec names: who refused, and which sinks cannot be written to yet."""

    refused: list[tuple[str, Refusal]] = field(default_factory=list)
    unready: dict[str, str] = field(default_factory=dict)


def _ask_servers(made: PipelinePlan) -> _Answers:
    """Asks each server once, even if several parts of the spec name it."""
    asked: dict[RedisAddress, Refusal | NotAnswering | None] = {}
    answers = _Answers()
    optional = {f"sink {sink.config.id}" for sink in made.optional}
    for where, address in made.addresses():
        if address not in asked:
            try:
                asked[address] = address.refusal()
            except NotAnswering as away:
                asked[address] = away
                log.warning("%s: %s", made.pipeline.name, _waited_for(made, where, address, away, where in optional))
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


def _waited_for(made: PipelinePlan, where: str, address: RedisAddress, away: NotAnswering, optional: bool) -> str:
    """What happens while a server does not answer: the pipeline waits for required parts, and starts without others."""
    if optional:
        return f"{where} at {address} does not answer ({away}); it is optional: its batches wait on disk until it does"
    deadline = made.pipeline.spec.retry.deadline
    until = "until it answers" if deadline == "none" else f"for {deadline / 1000:g} s, then the pipeline fails"
    return f"{where} at {address} does not answer ({away}). It is tried {until}, as retry.deadline says"


def java_path() -> str | None:
    """The Java that Spark's own script runs."""
    home = os.environ.get("JAVA_HOME")
    return str(Path(home, "bin", "java")) if home else shutil.which("java")


def java_problem(*, trust_release_file: bool = False) -> str | None:
    """What is wrong with the Java that Spark's own script runs, and what to do; None if Spark can run on it.

    ``trust_release_file``: read the version from the file that Java installations have for that, instead of starting
    Java, which takes up to half a second.
    """
    home = os.environ.get("JAVA_HOME")
    java = java_path()
    if java is None:
        return f"Spark needs Java {OLDEST_JAVA} or newer, and there is none. {_INSTALL}"
    if not os.access(java, os.X_OK):
        return f"JAVA_HOME is {home}, where no bin/java is. Unset it, or let it name a Java of {OLDEST_JAVA} or newer."
    if trust_release_file and _version_in_release_file(Path(java)) >= OLDEST_JAVA:
        return None
    remedy = "Let JAVA_HOME name another." if home else f"{_INSTALL}, or let JAVA_HOME name another."
    try:
        asked = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=_JAVA_STARTS_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{java} does not start ({error}), and Spark needs it. {remedy}"
    lines = [line.strip() for line in (asked.stderr + asked.stdout).splitlines() if not line.startswith("Picked up ")]
    output = next(filter(None, lines), "no word")
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
