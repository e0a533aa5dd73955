"""What can go wrong between a database and its changes. Messages end with what to do; none of them holds a secret."""

from __future__ import annotations

from millstream.errors import InvalidArgument, MillstreamError


class InvalidChangeOption(InvalidArgument):
    """An option of a change source is missing, unknown, or not what it may be. Nothing was made."""

    def __init__(self, option: str, got: object, allowed: str) -> None:
        super().__init__(f"option {option}", got, allowed)
        self.option = option


class SourceRefused(MillstreamError):
    """The database, as it is, cannot be followed. Nothing was made; the message says what to change there."""


class SourceUnreachable(MillstreamError):
    """The database does not answer, or has closed the connection. Trying again may help."""

    retryable = True


class PositionLost(MillstreamError):
    """What follows the checkpoint's position cannot be had any more: going on would leave a gap that nobody sees."""


class SnapshotLost(MillstreamError):
    """A file that says what a snapshot saw is gone, so that its changes cannot be told from what it holds."""


class SegmentDamaged(MillstreamError):
    """A file of the segments directory is not what was written."""

    path: str

    def __init__(self, path: str, why: str) -> None:
        super().__init__(
            f"{path} is damaged: {why}. Remove it and start the pipeline again: what it held is read anew.", path=path
        )


class SpoolClosed(MillstreamError):
    """What was read ahead cannot be added to: its session was stopped."""


class UnreadableMessage(MillstreamError):
    """The database sent what this decoder does not know."""
