"""``millstream init``: the generated service passes its tests and runs, and no file is overwritten."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from millstream.cli.init import files, package_name
from millstream.errors import InvalidArgument


def run(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=directory, capture_output=True, text=True, timeout=110, check=False)


def init(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run(directory, sys.executable, "-m", "millstream", "init", *words)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("new")
    done = init(parent, "web-shop")
    assert done.returncode == 0, done.stderr
    assert "make test" in done.stdout
    return parent / "web-shop"


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_generated_tests_pass_as_generated(shop: Path) -> None:
    done = run(shop, "make", "test", f"PYTHON={sys.executable}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_generated_service_can_be_run(shop: Path) -> None:
    words = ("-m", "millstream", "run", "web_shop.app:router", "--check", "--url", "local://check", "-o", "json")
    done = run(shop, sys.executable, *words)
    assert done.returncode == 0, done.stderr
    [handler] = json.loads(done.stdout)
    assert (handler["topic"], handler["group"]) == ("web-shop.orders", "web-shop")


def test_generated_files_are_complete_and_name_no_placeholder(shop: Path) -> None:
    texts = files("web-shop", "web_shop")
    assert {path: (shop / path).read_text() for path in texts} == texts
    assert {"Makefile", "Dockerfile", "web_shop/app.py", "tests/test_app.py", "pyproject.toml"} <= texts.keys()
    assert not [path for path, text in texts.items() if re.search(r"@[A-Z]+@", text)]


def test_generated_image_runs_the_service(shop: Path) -> None:
    lines = [line for line in (shop / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    assert lines == ["FROM millstream", "COPY web_shop /app/web_shop", 'CMD ["run", "web_shop.app:router"]']
    assert "!web_shop" in (shop / ".dockerignore").read_text()


def test_generated_code_passes_the_linter(shop: Path) -> None:
    ruff = Path(sys.executable).with_name("ruff")
    if not ruff.exists():
        pytest.skip("ruff is not installed")
    done = run(
        shop, str(ruff), "check", "--isolated", "--no-cache", "--select", "E,F,W,I,B,UP", "--line-length", "120", "."
    )
    assert done.returncode == 0, done.stdout


def test_directory_with_files_is_kept(tmp_path: Path) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "mine.txt").write_text("mine")
    done = init(tmp_path, "shop")
    assert done.returncode == 2
    assert [path.name for path in (tmp_path / "shop").iterdir()] == ["mine.txt"]
    assert init(tmp_path, "shop", "--to", str(tmp_path / "elsewhere")).returncode == 0
    assert (tmp_path / "elsewhere" / "shop" / "app.py").exists()


@pytest.mark.parametrize(
    "name",
    [
        "",
        "1shop",
        "../shop",
        "shop/app",
        "class",
        "json",
        "millstream",
        "tests",
        "a b",
        "é",
        "shop-",
        "redis",
        "PyDantic",
    ],
)
def test_name_that_cannot_be_a_package_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgument):
        package_name(name)


def test_name_becomes_a_package_name() -> None:
    assert package_name("Web-Shop_2") == "web_shop_2"


def test_name_of_a_package_in_this_directory_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "web_shop").mkdir()
    (tmp_path / "web_shop" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert package_name("web-shop") == "web_shop"


@pytest.mark.parametrize("name", ["Shop", "Web_-Shop", "a___b"])
def test_image_has_a_name_that_docker_allows(name: str) -> None:
    [line] = [line for line in files(name, package_name(name))["Makefile"].splitlines() if "docker build" in line]
    assert re.fullmatch(r"\tdocker build -t [a-z0-9]+(-[a-z0-9]+)* \.", line)
