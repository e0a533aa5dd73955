"""Appending once: rows and the writer's marker are one step, so that repeating it changes nothing."""

from millstream.broker.steps.once.call import BatchWriter, Once, OnceAt, append_once
from millstream.broker.steps.once.writer import WEEK_MS, Appended, BlockingOnceWriter, Digest, OnceWriter, RowsMissing

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
    "append_once",
]
