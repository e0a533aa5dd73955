"""Spark's checkpoint file manager, as pipelines choose it, with two writers of one log entry."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millstream.pipelines.session import ATOMIC_RENAME_MANAGER
from millstream.storage import open_storage
from support.hadoop_stores import Hdfs, S3Emulation, bare_jvm

pytestmark = [pytest.mark.spark, pytest.mark.at_length, pytest.mark.timeout(600)]
ROUNDS = 20


@pytest.fixture
def hdfs(tmp_path: Path) -> Iterator[Hdfs]:
    running = Hdfs(tmp_path / "hdfs")
    running.start()
    yield running
    running.kill()


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[S3Emulation]:
    running = S3Emulation(tmp_path / "moto.log")
    running.start()
    yield running
    running.stop()


class LogEntries:
    """Writes log entries as Spark does: a stream that becomes visible when it is closed, and must not replace."""

    def __init__(self, gateway: Any, location: str) -> None:
        self._jvm = gateway.jvm
        self._location = location
        conf = self._jvm.org.apache.hadoop.conf.Configuration()
        for name, value in self._settings():
            conf.set(name, value)
        loader = self._jvm.java.lang.Thread.currentThread().getContextClassLoader()
        kind = loader.loadClass(ATOMIC_RENAME_MANAGER)
        directory = self._jvm.org.apache.hadoop.fs.Path(location)
        arguments = gateway.new_array(self._jvm.java.lang.Object, 2)
        arguments[0], arguments[1] = directory, conf
        self._manager = kind.getConstructors()[0].newInstance(arguments)
        self._manager.mkdirs(directory)

    def _settings(self) -> list[tuple[str, str]]:
        result = self._jvm.java.lang.System.getProperties()
        prefix = "spark.hadoop."
        return [(name.removeprefix(prefix), result[name]) for name in list(result) if name.startswith(prefix)]

    def write(self, number: int, content: bytes) -> bool:
        path = self._jvm.org.apache.hadoop.fs.Path(f"{self._location}/{number}")
        stream = self._manager.createAtomic(path, False)
        stream.write(bytearray(content))
        try:
            stream.close()
        except Exception:
            stream.cancel()
            return False
        return True


def winners(entries: LogEntries, number: int) -> int:
    start, won = threading.Barrier(2), []

    def write(writer: int) -> None:
        start.wait()
        if entries.write(number, b"%d" % writer):
            won.append(writer)

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(won)


def test_one_of_two_writers_of_a_log_entry_wins_in_hdfs(hdfs: Hdfs) -> None:
    with bare_jvm() as gateway:
        hdfs.await_writes(gateway)
        entries = LogEntries(gateway, f"{hdfs.uri}/offsets")
        assert [winners(entries, number) for number in range(ROUNDS)] == [1] * ROUNDS


def test_log_entry_in_s3_is_whole_but_a_second_writer_is_not_always_refused(s3: S3Emulation) -> None:
    """The limit that the documentation states: in S3 only the lease of a run excludes a second driver."""
    with bare_jvm(s3.settings) as gateway:
        entries = LogEntries(gateway, f"{s3.uri}/offsets")
        counted = [winners(entries, number) for number in range(ROUNDS)]
        print(f"S3: {counted.count(2)} of {ROUNDS} entries were written by both writers")
        assert set(counted) <= {1, 2}
        storage = open_storage(f"{s3.uri}/offsets", lambda: gateway)
        assert {storage.read(str(number)) for number in range(ROUNDS)} <= {b"0", b"1"}
