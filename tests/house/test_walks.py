"""The picture of the house is true: walks name files that are there, and a publish goes the way that is told."""

from __future__ import annotations

import asyncio
import importlib.util
import re
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "millstream"
ROOMS = (ROOT / "docs" / "rooms.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def named_paths(text: str) -> list[str]:
    """What stands in backquotes and has a slash in it: files and folders, without arguments."""
    return sorted(set(re.findall(r"`([\w./-]+/[\w./-]*)`", text)))


@pytest.mark.parametrize("path", named_paths(ROOMS))
def test_every_file_of_the_walks_is_there(path: str) -> None:
    assert (PACKAGE / path).exists(), f"docs/rooms.md names {path}"


@pytest.mark.parametrize("path", named_paths(CONTRIBUTING))
def test_every_file_that_contributing_names_is_there(path: str) -> None:
    assert (ROOT / path).exists(), f"CONTRIBUTING.md names {path}"


def test_every_room_is_on_the_list() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    listed = set(re.findall(r"^\| `(\w+)/` \|", ROOMS, re.MULTILINE))
    assert listed == rooms


def test_a_publish_walks_as_the_page_says() -> None:
    told = re.search(r"<!-- publish -->(.*)<!-- /publish -->", ROOMS, re.DOTALL)
    assert told is not None
    listed = re.findall(r"^\d+\. `([\w/.]+)`", told[1], re.MULTILINE)
    walked = [file for file, _ in groupby(file for file, _ in asyncio.run(_script().hops("local://")))]
    first_visits = list(dict.fromkeys(walked))
    assert listed == first_visits


def _script() -> Any:
    spec = importlib.util.spec_from_file_location("count_hops", ROOT / "scripts" / "count_hops.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
