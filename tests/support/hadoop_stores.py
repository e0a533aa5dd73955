"""Stores for tests: HDFS, and an emulation of S3.

HDFS is a namenode and a datanode as processes of their own, from the published mini cluster's jar, which Maven fetches
once. S3 is moto's server, with Hadoop's connector; their 690 MB are fetched by `make s3` alone. Tests that need what is
not there are skipped.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from millstream.storage import StorageUnavailable, open_storage
from millstream.testing import wait_until
from millstream.testing.servers import free_port

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "millstream-tests"
HADOOP = "3.5.0"
MINICLUSTER = f"org.apache.hadoop:hadoop-client-minicluster:{HADOOP}"
_NAMENODE = "org.apache.hadoop.hdfs.server.namenode.NameNode"
_DATANODE = "org.apache.hadoop.hdfs.server.datanode.DataNode"
_LOG = """rootLogger.level = warn
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d %p %c: %m%n
"""


def minicluster_jar() -> Path:
    """Skips the test if it cannot be fetched."""
    name = MINICLUSTER.split(":")[1]
    jar = CACHE / f"hdfs-{HADOOP}" / f"{name}-{HADOOP}.jar"
    if jar.exists():
        return jar
    if shutil.which("mvn") is None or shutil.which("java") is None:
        pytest.skip("Maven or Java is not installed, so there is no HDFS to run against")
    command = ["mvn", "-q", "-B", "dependency:copy", f"-Dartifact={MINICLUSTER}", f"-DoutputDirectory={jar.parent}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    if done.returncode:
        pytest.skip(f"Maven cannot fetch {MINICLUSTER}: {done.stdout.strip().splitlines()[:1]}")
    return jar


@contextmanager
def bare_jvm(settings: Mapping[str, str] | None = None) -> Iterator[Any]:
    """The gateway of a JVM without a Spark session, with these settings of ``spark.conf``."""
    from pyspark import SparkConf
    from pyspark.java_gateway import launch_gateway

    conf = SparkConf(loadDefaults=False)
    for name, value in (settings or {}).items():
        conf.set(name, value)
    gateway = launch_gateway(conf, {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL})
    try:
        yield gateway
    finally:
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait()


class Hdfs:
    """One namenode, one datanode, on fixed ports and directories: both can be killed and started again."""

    def __init__(self, directory: Path) -> None:
        import pyspark

        jars = Path(pyspark.__file__).parent / "jars"
        self._classpath = f"{directory / 'conf'}:{minicluster_jar()}:{jars}/*"
        self._directory = directory
        self.port = free_port()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._configure()

    @property
    def uri(self) -> str:
        return f"hdfs://127.0.0.1:{self.port}"

    def start(self) -> None:
        if not (self._directory / "name" / "current").exists():
            self._java(_NAMENODE, "-format", "-nonInteractive").wait(180)
        self.start_namenode()
        self.start_datanode()

    def start_namenode(self) -> None:
        self._processes["namenode"] = self._java(_NAMENODE)
        await_port(self.port)

    def start_datanode(self) -> None:
        self._processes["datanode"] = self._java(_DATANODE)

    def await_writes(self, gateway: Any) -> None:
        """Until a datanode has registered with the namenode."""

        def accepted() -> bool:
            try:
                open_storage(f"{self.uri}/ready", lambda: gateway).write("record", b"1")
            except StorageUnavailable:
                return False
            return True

        wait_until(accepted, what="HDFS to accept writes", timeout_s=180)

    def kill(self, *names: str) -> None:
        """``namenode``, ``datanode``, or both."""
        for name in names or tuple(self._processes):
            process = self._processes.pop(name)
            process.send_signal(signal.SIGKILL)
            process.wait()

    def _java(self, *words: str) -> subprocess.Popen[bytes]:
        log = (self._directory / "hdfs.log").open("ab")
        options = [
            "-Xmx256m",
            "-XX:TieredStopAtLevel=1",
            f"-Dlog4j2.configurationFile=file:{self._directory}/log4j2.properties",
        ]
        with log:
            return subprocess.Popen(["java", *options, "-cp", self._classpath, *words], stdout=log, stderr=log)

    def _configure(self) -> None:
        conf = self._directory / "conf"
        conf.mkdir(parents=True)
        (self._directory / "log4j2.properties").write_text(_LOG)
        data = free_port()
        _write_xml(conf / "core-site.xml", {"fs.defaultFS": self.uri, "hadoop.tmp.dir": f"{self._directory}/tmp"})
        nowhere = "127.0.0.1:0"
        settings = {
            "dfs.replication": "1",
            "dfs.namenode.name.dir": f"{self._directory}/name",
            "dfs.datanode.data.dir": f"{self._directory}/data",
            "dfs.namenode.rpc-address": f"127.0.0.1:{self.port}",
            "dfs.namenode.http-address": nowhere,
            "dfs.datanode.address": f"127.0.0.1:{data}",
            "dfs.datanode.http.address": nowhere,
            "dfs.datanode.ipc.address": nowhere,
            "dfs.namenode.safemode.extension": "0",
            "dfs.heartbeat.interval": "1s",
            "dfs.permissions.enabled": "false",
        }
        _write_xml(conf / "hdfs-site.xml", settings)


class S3Emulation:
    """moto's server, with one bucket. It keeps objects in memory."""

    bucket = "millstream"

    def __init__(self, log: Path) -> None:
        self._server = CACHE / "moto" / "bin" / "moto_server"
        self._jars = sorted((CACHE / f"s3a-{HADOOP}").glob("*.jar"))
        if not self._server.exists() or not self._jars:
            pytest.skip("the S3 connector and moto are not installed: run `make s3`")
        self.port = free_port()
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def uri(self) -> str:
        return f"s3a://{self.bucket}"

    @property
    def settings(self) -> dict[str, str]:
        """``spark.conf`` of a pipeline."""
        return {
            "spark.jars": ",".join(map(str, self._jars)),
            "spark.hadoop.fs.s3a.endpoint": f"http://127.0.0.1:{self.port}",
            "spark.hadoop.fs.s3a.endpoint.region": "us-east-1",
            "spark.hadoop.fs.s3a.path.style.access": "true",
            "spark.hadoop.fs.s3a.access.key": "tests",
            "spark.hadoop.fs.s3a.secret.key": "tests",
        }

    def start(self) -> None:
        with self._log.open("ab") as log:
            command = [str(self._server), "-H", "127.0.0.1", "-p", str(self.port)]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        await_port(self.port)
        url = f"http://127.0.0.1:{self.port}/{self.bucket}"
        urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=30).close()

    def pause(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class HdfsStore:
    """HDFS whose outage is a kill of both of its processes."""

    name = "hdfs"

    def __init__(self, directory: Path) -> None:
        self._hdfs = Hdfs(directory / "hdfs")
        self.settings: dict[str, str] = {}

    def start(self) -> None:
        self._hdfs.start()
        with bare_jvm() as gateway:
            self._hdfs.await_writes(gateway)
        self.location = f"{self._hdfs.uri}/isolated"

    def fail(self) -> None:
        self._hdfs.kill("namenode", "datanode")

    def recover(self) -> None:
        self._hdfs.start_namenode()
        self._hdfs.start_datanode()

    def stop(self) -> None:
        self._hdfs.kill()


class S3Store:
    """An emulation of S3, which keeps objects in memory: its outage is a pause."""

    name = "s3"

    def __init__(self, directory: Path) -> None:
        self._s3 = S3Emulation(directory / "moto.log")
        self.location = f"{self._s3.uri}/isolated"

    @property
    def settings(self) -> dict[str, str]:
        # On the class path of every host, as installed software: `spark.jars` would copy 690 MB to each executor.
        settings = self._s3.settings
        jars = settings.pop("spark.jars").replace(",", ":")
        return settings | {"spark.driver.extraClassPath": jars, "spark.executor.extraClassPath": jars}

    def start(self) -> None:
        self._s3.start()

    def fail(self) -> None:
        self._s3.pause()

    def recover(self) -> None:
        self._s3.resume()

    def stop(self) -> None:
        self._s3.stop()


def await_port(port: int, timeout_s: float = 180) -> None:
    until = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            assert time.monotonic() < until, f"nothing listens on port {port}"
            time.sleep(0.1)


def _write_xml(path: Path, settings: Mapping[str, str]) -> None:
    ones = "".join(
        f"<property><name>{name}</name><value>{value}</value></property>" for name, value in settings.items()
    )
    path.write_text(f"<configuration>{ones}</configuration>")
