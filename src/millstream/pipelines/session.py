"""One Spark session for all pipelines of a run, and a session of its own within it for each of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from millstream.pipelines.plan import PipelinePlan
from millstream.pipelines.sinks import RedisSink
from millstream.pipelines.sources import RedisSource
from millstream.pipelines.spec.uri import has_secret

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Result = TypeVar("Result")

_CHECKPOINTING = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"


def hide_secrets(plans: Sequence[PipelinePlan]) -> dict[str, str]:
    """URIs with a password, each under the name of an environment variable that holds it.

    Spark shows a query's options in plans, logs and its UI. So it gets the variable's name, and each process looks
    the rest up. "secret" in the name makes Spark itself redact the settings that carry it to executors.
    """
    uris = dict.fromkeys(uri for made in plans for uri in _uris(made) if has_secret(uri))
    names = {uri: f"MILLSTREAM_SECRET_URI_{number}" for number, uri in enumerate(uris)}
    for uri, name in names.items():
        os.environ[name] = uri
    return {uri: f"${{{name}}}" for uri, name in names.items()}


def _uris(made: PipelinePlan) -> list[str]:
    spec = made.pipeline.spec
    found = [sink.config.uri for sink in spec.sinks if isinstance(sink, RedisSink)]
    found += [spec.source.config.uri] if isinstance(spec.source, RedisSource) else []
    return found + ([made.dead_letters.uri] if made.dead_letters else [])


def start_session(plans: Sequence[PipelinePlan], addresses: dict[str, str], master: str | None = None) -> SparkSession:
    """Workers run this interpreter. The files' own settings win, and of several files the first that gives one."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    from pyspark.sql import SparkSession

    given = [made.pipeline.spec.spark for made in plans]
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.streaming.metricsEnabled": "false",
        "spark.scheduler.mode": "FAIR",
        # Spark's own choice runs stat(1) several times a batch where Hadoop has no native library: 75 ms. Checkpoints
        # are on a local disk, where this one renames as atomically.
        "spark.sql.streaming.checkpointFileManagerClass": _CHECKPOINTING,
    }
    for reference in addresses.values():
        name = reference.removeprefix("${").removesuffix("}")
        settings[f"spark.executorEnv.{name}"] = os.environ[name]
    for one in reversed(given):
        settings |= one.conf
    wanted = (
        master or next((one.master for one in given if one.master), None) or os.environ.get("MILLSTREAM_SPARK_MASTER")
    )
    builder = SparkSession.builder.appName("millstream " + ", ".join(made.pipeline.name for made in plans))
    builder = builder.master(wanted or settings.pop("spark.master", "local[*]"))
    for name, value in settings.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel(os.environ.get("MILLSTREAM_SPARK_LOG", "ERROR"))
    return session


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
