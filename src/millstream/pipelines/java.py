"""The JVM through which this process reaches a checkpoint in a store: that of the Spark session if there is one, else
one without a session, started on first use and ended with the process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

from millstream.pipelines.spec.part import SECRET_WORDS

_lock = threading.Lock()
_bare: list[Any] = []


def gateway(settings: Mapping[str, str] | None = None) -> Any:
    """``settings``: of ``spark.conf``. Without a session, they reach Hadoop through here."""
    from pyspark import SparkContext

    if SparkContext._gateway is not None:
        return SparkContext._gateway
    with _lock:
        if not _bare:
            _bare.append(_started(settings or {}))
    for name, value in (settings or {}).items():
        if name.startswith("spark.hadoop."):
            _bare[0].jvm.java.lang.System.setProperty(name, value)
    return _bare[0]


def _started(settings: Mapping[str, str]) -> Any:
    from pyspark import SparkConf
    from pyspark.java_gateway import launch_gateway

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    conf = SparkConf(loadDefaults=False)
    for name, value in settings.items():
        # They become the JVM's command line, which every user of this machine can read.
        if not any(part in name.lower() for part in SECRET_WORDS) and name != "spark.master":
            conf.set(name, value)
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return launch_gateway(conf, quiet)  # type: ignore[no-untyped-call]  # pyspark does not type it


__all__ = ["gateway"]
