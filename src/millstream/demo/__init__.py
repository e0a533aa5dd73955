"""The demo: a broker, a pipeline on Spark, three workers of which one is killed, and a ledger of all messages.

All numbers of the ledger are counted from the streams and from the files that the workers write.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millstream.demo.run import run_demo as run_demo

__all__ = ["run_demo"]


def __getattr__(name: str) -> Any:
    """Import on first use: the worker processes do not need the terminal output."""
    if name != "run_demo":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from millstream.demo.run import run_demo

    return run_demo
