"""Generates ``broker/blocking_broker.py`` from the broker contract in ``broker/broker.py``, without ``await``.

``python scripts/make_blocking.py`` writes it; with ``--check`` it only reports whether it is up to date."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "millstream" / "broker"
PAGE, MADE = PACKAGE / "broker.py", PACKAGE / "blocking_broker.py"
DOCSTRING = '"""The broker contract for threads, generated from ``broker.py`` by ``scripts/make_blocking.py``."""'
REPLACEMENTS = (
    (r"\basync (def|with|for)\b", r"\1"),
    (r"\bawait ", ""),
    (r"\b(Broker|Transport|Listener|OnceWriter)\b", r"Blocking\1"),
    (r"\b(run|bound)_async\b", r"\1_blocking"),
    (r"__a(enter|exit)__", r"__\1__"),
    (r"event loops\. Thread-safe, usable from several event loops and", "threads. Thread-safe, and usable"),
)


def blocking(page: str) -> str:
    """The source text of the blocking class."""
    page = re.sub(r'\A""".*?"""', lambda _: DOCSTRING, page, flags=re.DOTALL)
    for pattern, replacement in REPLACEMENTS:
        page = re.sub(pattern, replacement, page)
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(MADE), "-"]
    return subprocess.run(command, input=page, capture_output=True, text=True, check=True).stdout


def main() -> int:
    made = blocking(PAGE.read_text())
    if "--check" not in sys.argv:
        MADE.write_text(made)
    elif not MADE.exists() or MADE.read_text() != made:
        print("blocking_broker.py is out of date. Run: python scripts/make_blocking.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
