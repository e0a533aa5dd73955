"""Makes ``broker/blocking_broker.py`` from the contract's page, ``broker/broker.py``: the same without ``await``.

``python scripts/make_blocking.py`` writes it; with ``--check`` it only says whether it is up to date.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOM = Path(__file__).parents[1] / "src" / "millstream" / "broker"
PAGE, MADE = ROOM / "broker.py", ROOM / "blocking_broker.py"
DOCSTRING = '"""The contract for threads, made from ``broker.py`` by ``scripts/make_blocking.py``: read that page."""'
WORDS = (
    (r"\basync (def|with|for)\b", r"\1"),
    (r"\bawait ", ""),
    (r"\b(Broker|Link|Listener|OnceWriter)\b", r"Blocking\1"),
    (r"\b(run|bound)_async\b", r"\1_blocking"),
    (r"__a(enter|exit)__", r"__\1__"),
    (r"event loops\. Thread-safe, usable from several event loops and", "threads. Thread-safe, and usable"),
)


def blocking(page: str) -> str:
    """The text of the class for threads."""
    page = re.sub(r'\A""".*?"""', lambda _: DOCSTRING, page, flags=re.DOTALL)
    for pattern, word in WORDS:
        page = re.sub(pattern, word, page)
    return page


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
