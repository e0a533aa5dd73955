"""Storage in a local directory."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from millstream.storage import (
    InvalidLocation,
    Storage,
    StorageDenied,
    StorageError,
    StorageFull,
    has_scheme,
    open_storage,
)
from millstream.storage.location import check_location, for_spark
from support.storage_contract import StorageContract


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(tmp_path / "data")


class TestLocalStorage(StorageContract):
    pass


def test_file_uri_is_a_local_directory(tmp_path: Path) -> None:
    storage = open_storage(f"file://{tmp_path}/with%20space")
    assert storage.is_local
    assert storage.location == f"{tmp_path}/with space"


@pytest.mark.parametrize("location", ["", "file://elsewhere/path", "file:relative", "hdfs://namenode/path"])
def test_invalid_locations_are_refused(location: str) -> None:
    if location == "file:relative":
        assert open_storage(location).is_local  # a relative path with a colon in its name
        return
    with pytest.raises(InvalidLocation):
        open_storage(location)


@pytest.mark.parametrize(
    "location", ["file:///data#1", "file:///data?1", "file:///a/b#c/d", "file:///data?", "file:///d#"]
)
def test_file_uri_with_a_query_or_fragment_is_refused(location: str) -> None:
    """Without it the path would be that of another directory."""
    with pytest.raises(InvalidLocation, match="%23"):
        check_location(location)
    with pytest.raises(InvalidLocation, match="%23"):
        open_storage(location)


@pytest.mark.parametrize("location", ["file:/data", "FILE:/data", "hdfs:/data", "s3a:/bucket/data"])
def test_uri_with_a_single_slash_is_refused(location: str) -> None:
    """It would be a relative path."""
    with pytest.raises(InvalidLocation, match="third slash"):
        check_location(location)


def test_more_slashes_in_a_file_uri_are_the_same_directory() -> None:
    assert open_storage("file:////data").location == "/data"


def test_only_other_stores_have_a_scheme() -> None:
    assert has_scheme("hdfs://namenode/path")
    assert has_scheme("S3A://bucket")
    assert not has_scheme("/path")
    assert not has_scheme("file:///path")
    assert not has_scheme("C:/path")


def test_spark_is_given_a_scheme_so_that_it_does_not_use_hadoop_s_default_file_system() -> None:
    assert for_spark("/data/with space") == "file:///data/with space"
    assert for_spark("hdfs://namenode/data") == "hdfs://namenode/data"


def test_files_are_private(storage: Storage) -> None:
    storage.write("d/record", b"x")
    assert Path(storage.uri("d/record")).stat().st_mode & 0o777 == 0o600
    assert Path(storage.uri("d")).stat().st_mode & 0o777 == 0o700


def test_failed_write_leaves_the_previous_object(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.write("record", b"previous")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageFull) as raised:
        storage.write("record", b"next")
    monkeypatch.undo()
    assert raised.value.location == storage.uri("record")
    assert raised.value.retryable
    assert storage.read("record") == b"previous"
    assert os.listdir(storage.location) == ["record"]


def test_errors_name_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError) as raised:
        open_storage(tmp_path / "file" / "inner").make()
    assert raised.value.location == str(tmp_path / "file" / "inner")

    def denied(*args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "mkdir", denied)
    with pytest.raises(StorageDenied):
        open_storage(tmp_path / "data").make()
