"""The ``redis_streams`` data source of Spark: what a query asks for enters as options, rows leave as Arrow batches.

Decisions (options, offsets, splits, gaps, mapping of rows) are pure and know no Spark; ``reader``, ``writer`` and
``source`` are the only modules that import pyspark. Nothing here consumes: a batch is a range, and can be read again.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

FORMAT = "redis_streams"

if TYPE_CHECKING:
    from millstream.spark.connection import Address as Address
    from millstream.spark.fan_out import write_here as write_here
    from millstream.spark.progress import backlog as backlog
    from millstream.spark.sink_options import Delivered as Delivered
    from millstream.spark.sink_options import read_report as read_report
    from millstream.spark.source import RedisStreamsSource as RedisStreamsSource

_HOMES = {
    "Address": "connection",
    "Delivered": "sink_options",
    "RedisStreamsSource": "source",
    "backlog": "progress",
    "read_report": "sink_options",
    "write_here": "fan_out",
}
"""Entered when asked for: Spark imports this room in short-lived processes of every application."""

__all__ = ["FORMAT", *_HOMES]  # noqa: PLE0604  # the keys are strings, which the rule does not see


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
