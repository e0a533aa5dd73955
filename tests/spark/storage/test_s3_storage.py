"""The storage contract against an emulation of S3, through Hadoop's connector."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

from millstream.storage import Storage, StorageDenied, open_storage
from support.hadoop_stores import S3Emulation, bare_jvm
from support.storage_contract import StorageContract

pytestmark = [pytest.mark.spark, pytest.mark.at_length, pytest.mark.timeout(600)]
_numbers = count()


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Emulation]:
    emulation = S3Emulation(tmp_path_factory.mktemp("s3") / "moto.log")
    emulation.start()
    yield emulation
    emulation.stop()


@pytest.fixture(scope="module")
def java(s3: S3Emulation) -> Iterator[Callable[[], Any]]:
    with bare_jvm(s3.settings) as gateway:
        yield lambda: gateway


@pytest.fixture
def storage(s3: S3Emulation, java: Callable[[], Any]) -> Storage:
    return open_storage(f"{s3.uri}/contract/{next(_numbers)}", java)


class TestS3Storage(StorageContract):
    pass


def test_missing_bucket_is_refused(java: Callable[[], Any]) -> None:
    storage = open_storage("s3a://no-such-bucket/d", java)
    with pytest.raises(StorageDenied, match="bucket"):
        storage.read("record")
    with pytest.raises(StorageDenied, match="bucket"):
        storage.write("record", b"1")
