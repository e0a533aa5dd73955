"""The files that make Spark start faster: where they are used, and where they are not."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from millstream.pipelines.start_cache import SWITCH, ArchiveNotCreated, StartCache, start_cache, variables_set

pytestmark = pytest.mark.skipif(find_spec("pyspark") is None, reason="Spark is not installed")


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in (SWITCH, "SPARK_HOME", "SPARK_SUBMIT_OPTS", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def cache_of(master: str = "local[2]", java: str | None = "/bin/sh") -> StartCache | None:
    return start_cache(master, java)


def existing_cache() -> StartCache:
    cache = cache_of()
    assert cache is not None
    return cache


def with_archive() -> StartCache:
    cache = existing_cache()
    cache.archive.write_bytes(b"classes")
    result = cache.archive.stat()
    cache.archive.with_suffix(".json").write_text(json.dumps({"size": result.st_size, "mtime": int(result.st_mtime)}))
    assert cache.is_ready()
    return cache


def test_home_links_the_jars_and_leaves_out_the_zipped_modules() -> None:
    home = existing_cache().home
    assert (home / "jars").is_dir()
    assert (home / "bin" / "spark-submit").exists()
    assert not (home / "python").exists()


def _remove_a_link(home: Path) -> None:
    (home / "bin").unlink()


def _copy_without_links(home: Path) -> None:
    (home / "jars").unlink()
    (home / "jars").mkdir()


def _point_elsewhere(home: Path) -> None:
    (home / "bin").unlink()
    (home / "bin").symlink_to("/nonexistent")


def _replace_by_a_file(home: Path) -> None:
    shutil.rmtree(home)
    home.write_text("")


def _replace_by_a_dangling_link(home: Path) -> None:
    shutil.rmtree(home)
    home.symlink_to("/nonexistent")


def _let_others_write(home: Path) -> None:
    home.chmod(0o777)


@pytest.mark.parametrize(
    "damage",
    [
        _remove_a_link,
        _copy_without_links,
        _point_elsewhere,
        _replace_by_a_file,
        _replace_by_a_dangling_link,
        _let_others_write,
    ],
)
def test_damaged_home_is_recreated(damage: Callable[[Path], None]) -> None:
    home = existing_cache().home
    links = {path.name: os.readlink(path) for path in home.iterdir()}
    damage(home)
    assert existing_cache().home == home
    assert {path.name: os.readlink(path) for path in home.iterdir()} == links
    assert home.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in home.parent.iterdir()] == ["home"]


def test_archive_is_not_created_where_the_lock_cannot_be_opened() -> None:
    cache = existing_cache()
    (cache.directory / "lock").mkdir()
    with pytest.raises(ArchiveNotCreated):
        cache.create()


def test_directories_belong_to_the_user_alone() -> None:
    directory = existing_cache().directory
    assert [path.stat().st_mode & 0o777 for path in (directory, directory.parent)] == [0o700, 0o700]


def test_same_java_and_spark_have_the_same_directory() -> None:
    assert cache_of() == cache_of()
    assert cache_of(java=sys.executable) != cache_of()


@pytest.mark.parametrize("master", ["yarn", "k8s://https://cluster:6443", "local-cluster[2,1,600]"])
def test_masters_that_need_the_zipped_modules_get_no_cache(master: str) -> None:
    assert cache_of(master) is None


@pytest.mark.parametrize(
    ("name", "value"), [("SPARK_HOME", "/opt/spark"), ("PYSPARK_PYTHON", "/opt/python"), (SWITCH, "off")]
)
def test_choice_of_the_user_is_kept(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert cache_of() is None


def test_no_cache_without_java() -> None:
    assert cache_of(java=None) is None


def test_directory_that_others_can_write_to_is_refused() -> None:
    existing_cache().directory.chmod(0o770)
    assert cache_of() is None


def test_directory_that_is_a_link_is_refused(cache_home: Path) -> None:
    (cache_home / "elsewhere").mkdir()
    (cache_home / "millstream").symlink_to(cache_home / "elsewhere")
    assert cache_of() is None


def test_cache_that_cannot_be_written_is_not_used(cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache_home / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_home / "file"))
    assert cache_of() is None


def test_java_options_of_the_user_have_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_SUBMIT_OPTS", "-Xmx3g")
    variables = with_archive().environment()
    assert variables["SPARK_SUBMIT_OPTS"].endswith(" -Xmx3g")
    assert "SharedArchiveFile" in variables["SPARK_SUBMIT_OPTS"]


def test_truncated_archive_is_not_used() -> None:
    cache = with_archive()
    os.truncate(cache.archive, 3)
    assert not cache.is_ready()
    assert cache.needs_archive()
    assert "SharedArchiveFile" not in cache.environment()["SPARK_SUBMIT_OPTS"]


def test_changed_archive_is_not_used() -> None:
    cache = with_archive()
    os.utime(cache.archive, ns=(0, 0))
    assert not cache.is_ready()


def test_archive_that_others_can_write_to_is_not_used() -> None:
    cache = with_archive()
    cache.archive.chmod(0o666)
    assert not cache.is_ready()


@pytest.mark.parametrize("text", ["{", "[]", "null", "", "[" * 50_000])
def test_damaged_manifest_is_not_used(text: str) -> None:
    cache = with_archive()
    cache.archive.with_suffix(".json").write_text(text)
    assert not cache.is_ready()


def test_failed_attempt_is_not_repeated_at_each_start() -> None:
    cache = existing_cache()
    assert cache.needs_archive()
    (cache.directory / "failed").write_text("no class data sharing")
    assert not cache.needs_archive()


def test_variables_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "before")
    with variables_set({"KEPT": "during", "ADDED": "during"}):
        assert (os.environ["KEPT"], os.environ["ADDED"]) == ("during", "during")
    assert os.environ["KEPT"] == "before"
    assert "ADDED" not in os.environ
