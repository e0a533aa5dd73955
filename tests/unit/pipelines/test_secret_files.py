"""Passwords are in files that only their user can read, while they are needed; Spark's options contain none."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest
from specs import pipeline, planned, redis_sink

from millstream.pipelines.redis_address import RedisAddress, SecretFiles, unreachable, without_secret_variables
from millstream.spark.connection import Address

SECRET = RedisAddress("redis://me:s3cret@h:1/2?sentinel_password=x")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_uri_with_a_password_becomes_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    secrets = SecretFiles()
    assert secrets.options(RedisAddress("redis://h:1")) == {"url": "redis://h:1"}
    assert list(tmp_path.iterdir()) == [], "nothing is made where nothing is secret"
    options = secrets.options(SECRET)
    assert options == secrets.options(SECRET)
    path = Path(options["urlFile"])
    assert (mode(path), mode(path.parent)) == (0o600, 0o700)
    assert Address("", url_file=str(path)).resolve() == SECRET.uri
    assert "s3cret" not in repr(Address("", url_file=str(path))) + repr(SECRET) + str(options)
    secrets.close()
    assert not path.parent.exists()


def test_files_of_a_killed_process_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead, living = tmp_path / "millstream-secrets-999999999-a", tmp_path / f"millstream-secrets-{os.getppid()}-b"
    dead.mkdir()
    living.mkdir()
    SecretFiles().options(SECRET)
    assert not dead.exists()
    assert living.exists()


def test_a_password_file_is_named_and_not_read(tmp_path: Path) -> None:
    address = RedisAddress("redis://me@h:1", "/etc/somewhere")
    assert SecretFiles().options(address) == {"url": "redis://me@h:1", "passwordFile": "/etc/somewhere"}


def test_a_cluster_needs_the_password_in_a_file_on_every_host() -> None:
    guarded = planned(sinks=[redis_sink(uri="redis://:s3cret@h:1")])
    assert list(unreachable(guarded.addresses(), "local[2]")) == []
    result = list(unreachable(guarded.addresses(), "spark://h:7077"))
    assert [where for where, _ in result] == ["sink main", "dlq"]
    assert all("password_file" in why and "s3cret" not in why for _, why in result)
    provided = planned(sinks=[redis_sink(uri="redis://me@h:1", password_file="/etc/p")])
    assert list(unreachable(provided.addresses(), "spark://h:7077")) == []


def test_a_password_is_given_once() -> None:
    with pytest.raises(ValueError, match="not in both"):
        pipeline(sinks=[redis_sink(uri="redis://:s3cret@h:1", password_file="/etc/p")])


def test_children_inherit_no_variable_with_a_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URI", SECRET.uri)
    monkeypatch.setenv("ONLY_THE_WORD", "s3cret")
    monkeypatch.setenv("OTHER", "s3cretly")
    with without_secret_variables([SECRET.uri]):
        assert {"REDIS_URI", "ONLY_THE_WORD"} & set(os.environ) == set()
        assert os.environ["OTHER"] == "s3cretly"
    assert os.environ["REDIS_URI"] == SECRET.uri
