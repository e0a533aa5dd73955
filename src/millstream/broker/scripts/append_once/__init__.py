"""Idempotent append: rows and the writer's marker are written in one atomic step, so that a repeated call adds
nothing.
"""

from millstream.broker.scripts.append_once.call import BatchWriter, Once, OnceAt, append_batches, append_once
from millstream.broker.scripts.append_once.writer import (
    WEEK_MS,
    Appended,
    BlockingOnceWriter,
    Digest,
    OnceWriter,
    RowsMissing,
)

__all__ = [
    "WEEK_MS",
    "Appended",
    "BatchWriter",
    "BlockingOnceWriter",
    "Digest",
    "Once",
    "OnceAt",
    "OnceWriter",
    "RowsMissing",
    "append_batches",
    "append_once",
]
