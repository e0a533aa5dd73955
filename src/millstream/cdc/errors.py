"""Errors of change data capture. Each message ends with what to do; none contains a secret."""

from __future__ import annotations

from collections.abc import Mapping

from millstream.errors import InvalidArgument, MillstreamError


class InvalidChangeOption(InvalidArgument):
    """An option of a change source is missing, unknown or invalid. Nothing was created."""

    def __init__(self, option: str, got: object, allowed: str) -> None:
        super().__init__(f"option {option}", got, allowed)
        self.option = option


class SourceRefused(MillstreamError):
    """The database cannot be followed in its current state. Nothing was created; the message says what to change."""


class SourceUnreachable(MillstreamError):
    """The database does not answer or closed the connection. A retry may succeed."""

    retryable = True


class PositionLost(MillstreamError):
    """The log after the checkpoint's position is gone. Continuing would leave an unnoticed gap."""


class TableChanged(MillstreamError):
    """A followed table was replaced, or rows entered or left it without an event, so the stream does not match it."""

    def __init__(self, changes: Mapping[str, str], *, during_snapshot: bool = False) -> None:
        listed = "; ".join(f"{table}: {why}" for table, why in sorted(changes.items()))
        advice = (
            "To continue, set `on_table_change: snapshot` and start the pipeline again: for each of these tables it "
            "sends a truncate event and a new snapshot. Or start over with all tables: `millstream pipeline reset`."
        )
        if during_snapshot:
            advice = "This happened during a snapshot, so start over with all tables: `millstream pipeline reset`."
        super().__init__(f"followed tables have changed in a way that the log does not contain: {listed}. {advice}")


class SnapshotLost(MillstreamError):
    """A file that records which transactions a snapshot includes is gone, so changes cannot be matched with rows."""


class SegmentDamaged(MillstreamError):
    """A segment file is missing or corrupt."""

    path: str

    def __init__(self, path: str, why: str) -> None:
        super().__init__(
            f"{path} is damaged: {why}. Remove it and start the pipeline again: its changes are read again.", path=path
        )


class ReadAheadClosed(MillstreamError):
    """The read-ahead log accepts no more messages because its session was stopped."""


class UnreadableMessage(MillstreamError):
    """The database sent a message that this decoder does not support."""
