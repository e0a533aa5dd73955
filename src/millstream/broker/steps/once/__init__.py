"""Appending once: rows and the writer's marker are one step, so that repeating it changes nothing."""

from millstream.broker.steps.once.call import BatchWriter, Once, OnceAt, append_once
from millstream.broker.steps.once.digest import WEEK_MS, Appended, Digest, RowsMissing
from millstream.broker.steps.once.writer import BlockingOnceWriter, OnceWriter

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
