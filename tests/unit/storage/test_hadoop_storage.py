"""Storage in a Hadoop file system, over an emulation of the JVM's side."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millstream.storage import (
    ConnectorMissing,
    InvalidLocation,
    ObjectMissing,
    Storage,
    StorageDenied,
    StorageError,
    StorageFull,
    StorageUnavailable,
    connect,
    hand_over,
    open_storage,
)
from millstream.storage.location import check_location
from support import fake_hadoop
from support.fake_hadoop import FakeHadoop, JavaError
from support.storage_contract import StorageContract


@pytest.fixture
def hadoop() -> FakeHadoop:
    return FakeHadoop()


NON_ATOMIC = "abfss://container@account.dfs.core.windows.net/pipelines/orders"


@pytest.fixture(params=["hdfs://namenode:8020/pipelines/orders", "s3a://bucket/pipelines/orders"])
def storage(request: pytest.FixtureRequest, hadoop: FakeHadoop) -> Storage:
    return open_storage(request.param, lambda: hadoop)


class TestHadoopStorage(StorageContract):
    pass


def test_no_temporary_file_remains(storage: Storage, hadoop: FakeHadoop) -> None:
    storage.write("record", b"1")
    storage.write("record", b"2")
    storage.create("once", b"1")
    storage.create("once", b"2")
    assert sorted(hadoop.files) == [storage.uri("once"), storage.uri("record")]


@pytest.mark.parametrize("call", ["create", "write", "close"])
def test_failed_write_leaves_the_previous_object(storage: Storage, hadoop: FakeHadoop, call: str) -> None:
    storage.write("record", b"previous")
    hadoop.fail(call, JavaError("ConnectException", "Connection refused"))
    with pytest.raises(StorageUnavailable) as raised:
        storage.write("record", b"next")
    assert raised.value.location == storage.uri("record")
    assert storage.read("record") == b"previous"
    assert [entry.name for entry in storage.list()] == ["record"]


REFUSED = JavaError("ConnectException", "Connection refused")


def test_replacement_that_fails_after_the_deletion_of_the_old_object_is_completed(hadoop: FakeHadoop) -> None:
    storage = open_storage(NON_ATOMIC, lambda: hadoop)
    storage.write("record", b"previous")
    hadoop.fail("rename", REFUSED)
    storage.write("record", b"next")
    assert storage.read("record") == b"next"
    assert sorted(hadoop.files) == [storage.uri("record")]


def test_replacement_that_cannot_be_completed_keeps_the_new_content(
    hadoop: FakeHadoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_storage(NON_ATOMIC, lambda: hadoop)
    storage.write("record", b"previous")
    called = hadoop.called

    def refuse_renames(call: str, apply: Callable[[], Any]) -> Any:
        if call == "rename":
            raise REFUSED
        return called(call, apply)

    monkeypatch.setattr(hadoop, "called", refuse_renames)
    with pytest.raises(StorageUnavailable) as raised:
        storage.write("record", b"next")
    assert [content for content, _ in hadoop.files.values()] == [b"next"]
    assert "record" in str(raised.value)
    monkeypatch.undo()
    storage.write("record", b"later")
    assert storage.read("record") == b"later"


def test_first_write_that_fails_publishes_nothing(hadoop: FakeHadoop) -> None:
    storage = open_storage(NON_ATOMIC, lambda: hadoop)
    hadoop.fail("write", REFUSED)
    with pytest.raises(StorageUnavailable):
        storage.write("record", b"partial")
    assert not storage.exists("record")
    assert storage.list() == []


def test_object_that_is_replaced_during_a_read_is_read_whole(storage: Storage, hadoop: FakeHadoop) -> None:
    for call in ("getFileStatus", "read"):
        storage.write("record", b"previous")
        hadoop.then(call, lambda: hadoop.store(storage.uri("record"), b"a longer replacement"))
        assert storage.read("record") in (b"previous", b"a longer replacement")


@pytest.mark.parametrize("call", ["hsync", "write", "close", "rename"])
def test_failure_whose_text_resembles_a_refusal_is_a_failure(hadoop: FakeHadoop, call: str) -> None:
    storage = open_storage("hdfs://namenode/d", lambda: hadoop)
    storage.write("record", b"previous")
    for attempt in (storage.write, storage.create):
        hadoop.fail(
            call, JavaError("RemoteException", "File /d/.writing-record.54121 could only be written to 0 nodes")
        )
        with pytest.raises(StorageUnavailable):
            attempt("record" if attempt == storage.write else "once", b"next")
    assert storage.read("record") == b"previous"
    assert not storage.exists("once")


def test_creator_whose_rename_was_applied_without_a_reply_may_create_again(hadoop: FakeHadoop) -> None:
    storage = open_storage("hdfs://namenode/d", lambda: hadoop)
    hadoop.lose_reply("rename", JavaError("ConnectException", "Connection reset"))
    with pytest.raises(StorageUnavailable):
        storage.create("once", b"mine")
    assert not storage.create("once", b"mine again")
    assert storage.read("once") == b"mine"


def test_rename_that_the_client_repeated_after_a_lost_reply_counts_as_created(hadoop: FakeHadoop) -> None:
    """The Hadoop client repeats a rename. The second attempt finds the file of the first one."""
    storage = open_storage("hdfs://namenode/d", lambda: hadoop)
    hadoop.lose_reply("rename", JavaError("FileAlreadyExistsException", "d/once"))
    assert storage.create("once", b"mine")
    assert storage.read("once") == b"mine"


def test_create_in_s3_requires_a_conditional_put(hadoop: FakeHadoop, monkeypatch: pytest.MonkeyPatch) -> None:
    required: list[tuple[str, bool]] = []
    original = fake_hadoop._Builder.must

    def must(builder: fake_hadoop._Builder, option: str, value: bool) -> fake_hadoop._Builder:
        required.append((option, value))
        return original(builder, option, value)

    monkeypatch.setattr(fake_hadoop._Builder, "must", must)
    assert open_storage("s3a://bucket/d", lambda: hadoop).create("once", b"1")
    assert required == [("fs.option.create.conditional.overwrite", True)]


@pytest.mark.parametrize(
    ("thrown", "expected", "advice"),
    [
        (JavaError("UnsupportedFileSystemException", 'No FileSystem for scheme "s3a"'), ConnectorMissing, "hadoop-aws"),
        (
            JavaError(
                "RuntimeException", "wrapped", JavaError("ClassNotFoundException", "Class S3AFileSystem not found")
            ),
            ConnectorMissing,
            "spark.jars.packages",
        ),
        (JavaError("UnknownStoreException", "Bucket does not exist"), StorageDenied, "bucket"),
        (
            JavaError("AccessDeniedException", "s3a://b", JavaError("NoAuthWithAWSException", "No AWS Credentials")),
            StorageDenied,
            "credentials",
        ),
        (JavaError("AccessControlException", "Permission denied: user=x"), StorageDenied, "permissions"),
        (JavaError("DSQuotaExceededException", "quota of /d is exceeded"), StorageFull, "quota"),
        (JavaError("IOException", "No space left on device"), StorageFull, "space"),
        (
            JavaError("RemoteException", "could only be written to 0 of the 1 minReplication nodes"),
            StorageUnavailable,
            "",
        ),
        (JavaError("ConnectException", "Connection refused"), StorageUnavailable, "runs"),
        (JavaError("SafeModeException", "Name node is in safe mode"), StorageUnavailable, "runs"),
        (JavaError("FileNotFoundException", "File does not exist"), ObjectMissing, "no such file"),
        (JavaError("IllegalArgumentException", "Wrong FS"), StorageError, "spark.conf"),
    ],
)
def test_errors_of_the_store_are_distinguished(
    hadoop: FakeHadoop, thrown: JavaError, expected: type[Exception], advice: str
) -> None:
    storage = open_storage("s3a://bucket/d", lambda: hadoop)
    hadoop.fail("open", thrown)
    with pytest.raises(expected) as raised:
        storage.read("record")
    assert type(raised.value) is expected
    assert "s3a://bucket/d" in str(raised.value)
    assert advice in str(raised.value)


def test_missing_bucket_is_not_a_missing_object(hadoop: FakeHadoop) -> None:
    """S3 answers the request for an object the same way in both cases, and only a listing names the bucket."""
    storage = open_storage("s3a://bucket/d", lambda: hadoop)
    hadoop.fail("getFileStatus", JavaError("UnknownStoreException", "Bucket does not exist"))
    with pytest.raises(StorageDenied, match="bucket"):
        storage.read("record")


def test_object_that_was_not_deleted_is_reported_as_such(hadoop: FakeHadoop, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage("hdfs://namenode/d", lambda: hadoop)
    storage.write("record", b"1")
    monkeypatch.setattr(fake_hadoop._Fs, "delete", lambda *arguments: False)
    with pytest.raises(StorageUnavailable, match="did not delete") as raised:
        storage.delete("record")
    assert "JVM" not in str(raised.value)


def test_store_without_datanodes_is_not_full(hadoop: FakeHadoop) -> None:
    """Otherwise the queue of an optional sink would drop its batches."""
    storage = open_storage("hdfs://namenode/d", lambda: hadoop)
    assert storage.free_bytes() == 1 << 40
    hadoop.remaining = 0
    with pytest.raises(StorageUnavailable):
        storage.free_bytes()
    assert open_storage("s3a://bucket/d", lambda: hadoop).free_bytes() is None


def test_calls_have_bounded_waits(hadoop: FakeHadoop) -> None:
    open_storage("hdfs://namenode/d", lambda: hadoop).make()
    assert int(hadoop.settings["ipc.client.rpc-timeout.ms"]) <= 60_000
    assert int(hadoop.settings["ipc.client.connect.max.retries"]) <= 10


@pytest.mark.parametrize(
    ("location", "advice"),
    [
        ("s3://bucket/d", "s3a://"),
        ("redis://host/d", "hdfs"),
        ("s3a:///d", "bucket"),
        ("file://host/d", "file:///directory"),
    ],
)
def test_unknown_scheme_is_refused_with_the_known_ones(location: str, advice: str) -> None:
    with pytest.raises(InvalidLocation, match=advice):
        check_location(location)


def test_known_locations_are_accepted() -> None:
    for location in (
        "/d",
        "d",
        "file:///d",
        "hdfs:///d",
        "hdfs://nameservice/d",
        "s3a://b/d",
        "abfss://c@a/d",
        "gs://b/d",
    ):
        check_location(location)


def test_connection_to_a_jvm_that_has_ended_is_an_outage(tmp_path: Path) -> None:
    storage = open_storage("hdfs://namenode/d", connect(str(tmp_path / "gone")))
    with pytest.raises(StorageUnavailable):
        storage.read("record")


def test_hand_over_names_port_and_token() -> None:
    from types import SimpleNamespace

    parameters = SimpleNamespace(address="127.0.0.1", port=1234, auth_token="t0ken")
    values = json.loads(hand_over(SimpleNamespace(gateway_parameters=parameters)))
    assert values == {"address": "127.0.0.1", "port": 1234, "token": "t0ken"}
