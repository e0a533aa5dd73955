"""Who writes: (application, version, sink, partition). The same identity again is a replay, and adds nothing."""

from __future__ import annotations

from typing import NamedTuple

from millstream.spark.errors import NoWriteIdentity


class WriteIdentity(NamedTuple):
    """``version`` only grows within an application; a lower one is a zombie, and is refused."""

    app: str
    version: int
    sink: str
    partition: int

    @property
    def writer(self) -> str:
        """The name under which the stream remembers how far this writer has come."""
        return f"{self.app}/{self.sink}"


def streaming_identity(query_id: str | None, batch_id: str | None, sink: str, partition: int) -> WriteIdentity:
    """From what Spark tells the task. Never a fallback: without ids a replay would add every row again."""
    if not query_id or not batch_id:
        raise NoWriteIdentity(
            "this streaming write finds no query id or batch id in its task, so that a replay could not be recognised. "
            "In foreachBatch write the batch with options txnAppId and txnVersion, or choose delivery=at_least_once "
            "or exactly_once_by_event_id."
        )
    return WriteIdentity(query_id, int(batch_id), sink, partition)
