"""Wheel and sdist have the same bytes, independent of place and time of the build."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILT_FROM = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "SECURITY.md", "constraints.txt", "src")


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("backend")
    command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(place), "hatchling"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    if done.returncode:
        pytest.skip("the build backend cannot be installed here")
    return place


def copy_of_the_tree(place: Path) -> Path:
    place.mkdir(parents=True)
    for name in BUILT_FROM:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, place / name)
    return place


def build(backend: Path, tree: Path, seed: str, umask: int) -> dict[str, str]:
    """The name and the digest of each file that was built."""
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(backend), "PYTHONHASHSEED": seed}
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", "built"],
        cwd=tree,
        env=env,
        umask=umask,
        capture_output=True,
        timeout=110,
        check=True,
    )
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted((tree / "built").iterdir())}


def test_two_builds_in_two_places_are_equal(backend: Path, tmp_path: Path) -> None:
    first = copy_of_the_tree(tmp_path / "a")
    second = copy_of_the_tree(tmp_path / "elsewhere" / "with-another-name")
    for path in second.rglob("*"):
        os.utime(path, (1_000_000_000, 1_000_000_000))
    (second / "src" / "millstream" / "__pycache__").mkdir()
    (second / "src" / "millstream" / "__pycache__" / "x.pyc").write_bytes(b"compiled")
    built = build(backend, first, "1", 0o022)
    assert built == build(backend, second, "2", 0o077)
    assert len(built) == 2


def test_wheel_that_is_built_from_the_sdist_is_equal(backend: Path, tmp_path: Path) -> None:
    tree = copy_of_the_tree(tmp_path / "tree")
    built = build(backend, tree, "1", 0o022)
    [sdist] = (tree / "built").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    [unpacked] = (tmp_path / "unpacked").iterdir()
    again = build(backend, unpacked, "2", 0o077)
    [wheel] = [name for name in built if name.endswith(".whl")]
    assert again[wheel] == built[wheel]


def test_wheel_has_every_file_of_the_package_and_nothing_of_this_machine(backend: Path, tmp_path: Path) -> None:
    tree = copy_of_the_tree(tmp_path / "tree")
    build(backend, tree, "1", 0o022)
    [wheel] = (tree / "built").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        texts = b"".join(archive.read(name) for name in names if ".dist-info/" in name)
    sources = {str(path.relative_to(tree / "src")) for path in (tree / "src").rglob("*") if path.is_file()}
    assert {name for name in sources if not name.endswith(".pyc")} <= names
    assert str(tree).encode() not in texts
    assert b"Classifier: Programming Language :: Python :: 3.13" in texts
