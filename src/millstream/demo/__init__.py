"""The demonstration: a broker, a pipeline on Spark, three workers of which one is killed, and a ledger that is counted.

Nothing here is believed: every number on the screen is read from the streams and from what the workers wrote down.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millstream.demo.run import run_demo as run_demo

__all__ = ["run_demo"]


def __getattr__(name: str) -> Any:
    """Entered when asked for: a worker is a process of its own, and has no use for the screen."""
    if name != "run_demo":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from millstream.demo.run import run_demo

    return run_demo
