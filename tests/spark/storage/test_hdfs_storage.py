"""The storage contract against a real HDFS, from the driver's process and from a planning process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from millstream.storage import Storage, StorageFull, StorageUnavailable, connect, hand_over, open_storage
from support.hadoop_stores import Hdfs, bare_jvm
from support.storage_contract import StorageContract

pytestmark = [pytest.mark.spark, pytest.mark.at_length, pytest.mark.timeout(600)]
_numbers = count()


@pytest.fixture(scope="module")
def gateway() -> Iterator[Any]:
    with bare_jvm() as running:
        yield running


@pytest.fixture(scope="module")
def hdfs(tmp_path_factory: pytest.TempPathFactory, gateway: Any) -> Iterator[Hdfs]:
    cluster = Hdfs(tmp_path_factory.mktemp("hdfs"))
    try:
        cluster.start()
        cluster.await_writes(gateway)
        yield cluster
    finally:
        cluster.kill()


@pytest.fixture(params=["driver", "planning process"])
def way(request: pytest.FixtureRequest, gateway: Any, tmp_path: Path) -> Callable[[], Any]:
    if request.param == "driver":
        return lambda: gateway
    file = tmp_path / "gateway"
    file.write_text(hand_over(gateway))
    return connect(str(file))


@pytest.fixture
def storage(hdfs: Hdfs, way: Callable[[], Any]) -> Storage:
    return open_storage(f"{hdfs.uri}/contract/{next(_numbers)}", way)


class TestHdfsStorage(StorageContract):
    pass


def test_no_temporary_file_remains(hdfs: Hdfs, gateway: Any) -> None:
    storage = open_storage(f"{hdfs.uri}/temporary", lambda: gateway)
    storage.write("record", b"1")
    storage.write("record", b"2")
    assert not storage.create("record", b"3")
    listed = gateway.jvm.org.apache.hadoop.fs.Path(storage.location)
    fs = listed.getFileSystem(gateway.jvm.org.apache.hadoop.conf.Configuration())
    assert [status.getPath().getName() for status in fs.listStatus(listed)] == ["record"]


def test_quota_is_a_full_store(hdfs: Hdfs, gateway: Any) -> None:
    storage = open_storage(f"{hdfs.uri}/quota", lambda: gateway)
    storage.make()
    jvm = gateway.jvm
    admin = jvm.org.apache.hadoop.hdfs.client.HdfsAdmin(
        jvm.java.net.URI.create(hdfs.uri), jvm.org.apache.hadoop.conf.Configuration()
    )
    admin.setSpaceQuota(jvm.org.apache.hadoop.fs.Path(storage.location), 1024)
    with pytest.raises(StorageFull):
        storage.write("record", b"x" * 100_000)
    assert storage.list() == []


def test_confirmed_writes_survive_kills_of_namenode_and_datanode(hdfs: Hdfs, gateway: Any) -> None:
    storage = open_storage(f"{hdfs.uri}/killed", lambda: gateway)
    storage.write("record", b"version 1")
    assert storage.create("once", b"first")
    for names in (("namenode",), ("datanode",), ("namenode", "datanode")):
        hdfs.kill(*names)
        if "namenode" in names:
            with pytest.raises(StorageUnavailable):
                storage.write("record", b"never")
            hdfs.start_namenode()
        if "datanode" in names:
            hdfs.start_datanode()

        hdfs.await_writes(gateway)
        storage.write("record", repr(names).encode())
        assert storage.read("record") == repr(names).encode()
        assert storage.read("once") == b"first"
        assert not storage.create("once", b"second")
