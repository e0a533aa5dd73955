"""Writes the pages under docs/reference that are made from the code: the command line and the key names.

``python scripts/make_reference.py`` writes them; with ``--check`` it only says whether they are up to date.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from millstream.broker.keys import LEGEND
from millstream.cli.exit_codes import LEGEND as EXITS
from millstream.cli.main import CHAPTERS

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"


def command_line() -> str:
    lines = [
        "# The command line",
        "",
        "`millstream COMMAND --help` tells the options. Every command takes `--url` (or",
        "`MILLSTREAM_URL`); every listing and every change takes `-o table|json`. Made from the code.",
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


PAGES: dict[str, Callable[[], str]] = {"cli.md": command_line, "keys.md": keys}


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
