"""A standalone Spark cluster whose hosts share no disk: each in a mount namespace of its own.

In a namespace the root file system is read-only, and the directory ``private`` is a tmpfs of this host alone. So a
process that writes to a shared disk fails. Needs root, and ``unshare`` from util-linux.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream.testing.servers import free_port
from support.hadoop_stores import await_port

_ENTER = """
mount --make-rprivate / && mount -o remount,bind,ro / && mount -t tmpfs tmpfs "$0" && mount -t tmpfs tmpfs /dev/shm \
&& cd "$0" && exec "$@"
"""


def require_namespaces() -> None:
    """Skips the test where mount namespaces cannot be created."""
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed, so hosts cannot be separated")
    tried = subprocess.run(
        ["unshare", "-m", "sh", "-c", "mount --make-rprivate / && mount -o remount,bind,ro /"],
        capture_output=True,
        check=False,
    )
    if tried.returncode:
        pytest.skip("mount namespaces need root, so hosts cannot be separated")


class IsolatedHost:
    """A process, and what it starts, with a disk of its own."""

    def __init__(self, private: Path, log: Path, *command: str, **environment: str) -> None:
        python_path = os.pathsep.join(filter(None, sys.path))
        own = {
            "HOME": str(private),
            "TMPDIR": str(private),
            "SPARK_LOCAL_DIRS": f"{private}/local",
            "SPARK_WORKER_DIR": f"{private}/work",
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": python_path,
            "PYTHONDONTWRITEBYTECODE": "1",
            "JDK_JAVA_OPTIONS": f"-XX:-UsePerfData -XX:TieredStopAtLevel=1 -Djava.io.tmpdir={private}",
        }
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                ["unshare", "-m", "sh", "-c", _ENTER, str(private), *command],
                stdout=file,
                stderr=file,
                start_new_session=True,
                env={**os.environ, **own, **environment},
            )

    def kill(self) -> None:
        """With everything that it has started."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()

    def kill_children(self, named: str) -> int:
        """Kills the processes below this one whose command line holds ``named``; returns how many there were."""
        killed = 0
        for process in _below(self.process.pid):
            try:
                if named.encode() in Path("/proc", str(process), "cmdline").read_bytes():
                    os.kill(process, signal.SIGKILL)
                    killed += 1
            except (FileNotFoundError, ProcessLookupError):
                continue
        return killed


class IsolatedCluster:
    """A master and two workers with one core each."""

    def __init__(self, directory: Path) -> None:
        self.private = directory / "private"
        self.private.mkdir()
        self._directory = directory
        self._port = free_port()
        bin_directory = Path(sys.executable).parent
        spark_class = str(bin_directory / "spark-class")
        master = ["org.apache.spark.deploy.master.Master", "--host", "127.0.0.1", "--port", str(self._port)]
        self.master = self.host("master", spark_class, *master, "--webui-port", "0")
        await_port(self._port)
        self._worker = [spark_class, "org.apache.spark.deploy.worker.Worker"]
        self._worker += ["--cores", "1", "--memory", "1g", "--webui-port", "0"]
        self.workers = [self._start_worker(number) for number in range(2)]

    @property
    def url(self) -> str:
        return f"spark://127.0.0.1:{self._port}"

    @property
    def settings(self) -> dict[str, str]:
        """``spark.conf`` of a pipeline that runs here."""
        return {
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.executor.memory": "512m",
            "spark.cores.max": "2",
            "spark.executor.cores": "1",
            "spark.hadoop.hadoop.tmp.dir": f"{self.private}/hadoop",
            "spark.local.dir": f"{self.private}/local",
            "spark.executorEnv.PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "spark.executorEnv.PYTHONDONTWRITEBYTECODE": "1",
        }

    def host(self, name: str, *command: str, **environment: str) -> IsolatedHost:
        return IsolatedHost(self.private, self._directory / f"{name}.log", *command, **environment)

    def kill_worker(self, number: int) -> None:
        """With its executors."""
        self.workers[number].kill()

    def restart_worker(self, number: int) -> None:
        """With an empty disk."""
        self.workers[number] = self._start_worker(number)

    def _start_worker(self, number: int) -> IsolatedHost:
        # Each worker needs an address of its own: executors at one address read each other's shuffle files from disk.
        return self.host(f"worker-{number}", *self._worker, "--host", f"127.0.0.{number + 2}", self.url)

    def close(self) -> None:
        for host in (*self.workers, self.master):
            host.kill()


def _below(process: int) -> Iterator[int]:
    children = Path("/proc", str(process), "task", str(process), "children")
    try:
        result = [int(child) for child in children.read_text().split()]
        threads = list(Path("/proc", str(process), "task").iterdir())
    except FileNotFoundError:
        return
    for thread in threads:
        try:
            result += [int(child) for child in (thread / "children").read_text().split()]
        except FileNotFoundError:
            continue
    for child in set(result):
        yield child
        yield from _below(child)
