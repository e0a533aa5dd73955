"""Writes the pages under docs/reference that are made from the code: the command line and the key names.

``python scripts/make_reference.py`` writes them; with ``--check`` it only says whether they are up to date.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from millstream.broker.keys import LEGEND
from millstream.cli.exit_codes import LEGEND as EXITS
from millstream.cli.json_keys import ANSWERS, KINDS
from millstream.cli.main import CHAPTERS

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"


def command_line() -> str:
    lines = [
        "# The command line",
        "",
        "`millstream COMMAND --help` tells the options. Every command takes `--url` (or",
        "`MILLSTREAM_URL`); every listing and every change takes `-o table|json`: [the keys](json.md). Tables are as",
        "wide as the terminal: numbers and ids stay whole, names are cut in the middle. Made from the code.",
        "",
    ]
    lines += ["| command | what it does |", "|---|---|"]
    lines += [f"| `millstream {name}` | {chapter.help} |" for name, chapter in CHAPTERS.items()]
    lines += ["", "## Exit codes", "", "| code | means |", "|---|---|"]
    lines += [f"| {code} | {meaning} |" for code, meaning in EXITS.items()]
    lines += ["", "## Completion", "", "`millstream --install-completion` installs it for the shell that is running."]
    return "\n".join(lines) + "\n"


def keys() -> str:
    lines = [
        "# Keys beside a stream",
        "",
        "Every companion of the stream `orders` is called `{orders}.<suffix>`, and lies",
        "in its slot. Made from the code.",
        "",
        "| suffix | holds | ends |",
        "|---|---|---|",
    ]
    lines += [f"| `{one.suffix}` | {one.holds} | {one.ends} |" for one in LEGEND]
    return "\n".join(lines) + "\n"


def json_keys() -> str:
    shapes = {"list": "a list of objects", "object": "one object", "lines": "an object a line"}
    lines = [
        "# What `-o json` prints",
        "",
        "Numbers are numbers, times are ISO 8601 in UTC, durations are milliseconds (`_ms`), sizes bytes (`_bytes`).",
        "A key that stands here stays; new ones may be added. Made from the code; a test holds every command to it.",
        "",
        "| kind | means |",
        "|---|---|",
    ]
    lines += [f"| {kind} | {meaning} |" for kind, meaning in KINDS.items()]
    lines += ["", "`?` behind a kind: it may be null."]
    for command, answer in ANSWERS.items():
        lines += [
            "",
            f"## `millstream {command}`",
            "",
            f"Prints {shapes[answer.shape]}.",
            "",
            "| key | kind |",
            "|---|---|",
        ]
        lines += [f"| `{key}` | {kind} |" for key, kind in _flattened(answer.keys)]
    return "\n".join(lines) + "\n"


def _flattened(keys: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, kind in keys.items():
        if isinstance(kind, list):
            yield f"{prefix}{key}", "a list of objects"
            yield from _flattened(kind[0], f"{prefix}{key}[].")
        else:
            yield f"{prefix}{key}", kind


PAGES: dict[str, Callable[[], str]] = {"cli.md": command_line, "json.md": json_keys, "keys.md": keys}


def main() -> int:
    stale = []
    for name, make in PAGES.items():
        path, text = REFERENCE / name, make()
        if "--check" in sys.argv:
            if not path.exists() or path.read_text() != text:
                stale.append(name)
        else:
            path.write_text(text)
    if stale:
        print(f"out of date: {', '.join(stale)}. Run: python scripts/make_reference.py")
    return len(stale)


if __name__ == "__main__":
    sys.exit(main())
