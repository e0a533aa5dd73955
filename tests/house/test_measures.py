"""Fewer, fuller files, and one meaning per word: what is measured of the house, and must hold."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from measure_house import SMALL, SOURCE, classes_used_twice, code_lines, python_files  # noqa: E402 (beside the product)

MOST_FILES = 360
"""Another file is another noun: look first for the one that it belongs to."""
LONGEST = 450
"""Lines of a file; near 400, look for its second noun."""
A_MIDDLEWARE = "one middleware, one file: what CONTRIBUTING promises to whoever adds one"
A_ROOMS_ERRORS = (
    "what can go wrong in a room stands in its ``errors.py``, and each line of it is a name that people catch"
)
SMALL_WITH_A_REASON = {
    "__main__.py": "Python asks for a file of this name",
    "assignment/errors.py": A_ROOMS_ERRORS,
    "cdc/errors.py": A_ROOMS_ERRORS,
    "cdc/source.py": "Spark's workers load this one and no more: with its neighbours they would wait for all of them",
    "messaging/middleware/correlation.py": A_MIDDLEWARE,
    "messaging/middleware/faults.py": A_MIDDLEWARE,
    "messaging/middleware/metrics.py": A_MIDDLEWARE,
    "messaging/middleware/recoverer.py": A_MIDDLEWARE,
    "messaging/middleware/timeout.py": A_MIDDLEWARE,
    "model/clock.py": "time as a parameter is what a reader looks for, and nothing else in the room knows a clock",
}


def test_there_are_not_more_files_than_a_reader_can_know() -> None:
    assert len(python_files()) <= MOST_FILES, "join two that a reader looks for under one noun"


def test_no_file_is_confetti_without_a_reason() -> None:
    """Doors (``__init__.py``) aside."""
    small = {
        str(path.relative_to(SOURCE))
        for path in python_files()
        if path.name != "__init__.py" and code_lines(path) < SMALL
    }

    assert small - SMALL_WITH_A_REASON.keys() == set(), f"under {SMALL} lines of code: find the neighbour to join"
    assert SMALL_WITH_A_REASON.keys() - small == set(), "these have grown, or are gone: take them off the list"


def test_no_file_has_two_nouns() -> None:
    long = {str(path.relative_to(SOURCE)): count for path in python_files() if (count := _lines(path)) > LONGEST}

    assert long == {}


def test_no_two_classes_share_a_name() -> None:
    """Of what is public, the kit of tests aside."""
    assert classes_used_twice() == {}, "find another word for one of them"


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines())
