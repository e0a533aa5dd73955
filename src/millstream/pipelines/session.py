"""One Spark session for all pipelines of a run, and a session of its own within it for each of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from millstream.pipelines.errors import SparkNotStarted, short
from millstream.pipelines.plan import PipelinePlan
from millstream.pipelines.redis_address import without_secret_variables
from millstream.pipelines.spec.part import SECRET_WORDS

if TYPE_CHECKING:
    from pyspark import SparkConf
    from pyspark.sql import SparkSession

Result = TypeVar("Result")

_CHECKPOINTING = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"


def wanted_master(plans: Sequence[PipelinePlan], master: str | None = None) -> str:
    """Where Spark runs: as the command line says, else the first file that does, else the environment, else here."""
    given = [made.pipeline.spec.spark for made in plans]
    return (
        master
        or next((one.master for one in given if one.master), None)
        or os.environ.get("MILLSTREAM_SPARK_MASTER")
        or next((one.conf["spark.master"] for one in given if "spark.master" in one.conf), None)
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

    try:
        return _start(plans, master, log)
    except (PySparkException, Py4JError) as error:
        thrown = getattr(error, "java_exception", None)
        said = str(thrown.toString()).splitlines()[0] if thrown is not None else short(error, 300)
        said = _last_words(log) if "JAVA_GATEWAY_EXITED" in str(error) else said
        raise SparkNotStarted(said, str(log) if log else None) from error


def _start(plans: Sequence[PipelinePlan], master: str | None, log: Path | None) -> SparkSession:
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.streaming.metricsEnabled": "false",
        "spark.scheduler.mode": "FAIR",
        # Spark's own choice runs stat(1) several times a batch where Hadoop has no native library: 75 ms. Checkpoints
        # are on a local disk, where this one renames as atomically.
        "spark.sql.streaming.checkpointFileManagerClass": _CHECKPOINTING,
        "spark.redaction.regex": f"(?i){'|'.join(SECRET_WORDS)}",
    }
    for made in reversed(plans):
        settings |= made.pipeline.spec.spark.conf
    settings["spark.master"] = wanted_master(plans, master)
    settings["spark.app.name"] = "millstream " + ", ".join(made.pipeline.name for made in plans)
    # What stands in a builder becomes the JVM's command line, for every user of the machine to read. So the JVM is
    # started with what is no secret, and is told the rest when it listens.
    open_ones = SparkConf(loadDefaults=False)
    for name, value in settings.items():
        if not any(word in name.lower() for word in SECRET_WORDS):
            open_ones.set(name, value)
    with without_secret_variables([text for made in plans for text in made.secrets()]):
        if log is None or SparkContext._gateway is not None:
            SparkContext._ensure_initialized(conf=open_ones)
        else:
            with log.open("ab") as file:
                gateway = _gateway(open_ones, file)
            SparkContext._ensure_initialized(gateway=gateway, conf=open_ones)
    builder = SparkSession.builder
    for name, value in settings.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel(os.environ.get("MILLSTREAM_SPARK_LOG", "ERROR"))
    return session


def _last_words(log: Path | None) -> str:
    """Of a Java that ended: its error and the line behind it, or else the last that it said."""
    lines = log.read_text(errors="replace").splitlines()[-200:] if log is not None else []
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
            said = str(error.java_exception.getMessage()) if isinstance(error, Py4JJavaError) else str(error)
            return next((line for line in said.splitlines() if line.strip()), type(error).__name__)
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
