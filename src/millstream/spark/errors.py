"""Errors of the data source. Messages name the option to change; none contains a secret."""

from __future__ import annotations

from typing import Any

from millstream.errors import InvalidArgument, MillstreamError


class InvalidOption(InvalidArgument):
    """An option is missing, unknown or not valid. Raised before any data is read or written. ``argument`` names it;
    ``got`` is its value without secrets."""

    def __init__(self, option: str, got: object, allowed: str) -> None:
        super().__init__(f"option {option}", got, allowed)
        self.option = option
        self.got = got


class DataLost(MillstreamError):
    """Entries were removed from the stream before this reader read them.

    ``lost`` counts them, or is None if the number is unknown. ``certain`` is false if entries were deleted one by one,
    which cannot be distinguished from trimming: then the loss is only possible.
    """

    stream: str
    lost: int | None
    certain: bool

    def __init__(self, stream: str, explanation: str, *, lost: int | None, certain: bool) -> None:
        super().__init__(
            f"{explanation} Set the option group and use safe trimming, so that unread entries are kept, or set "
            "failOnDataLoss=false to log the gap and continue.",
            stream=stream,
            lost=lost,
            certain=certain,
        )


class MalformedEntry(MillstreamError):
    """With mode=FAILFAST: a field's text cannot be cast to its column's type."""


class UnusableRow(MillstreamError):
    """A row cannot become an entry: it has no field, stream or event id. No row of its chunk was written."""


class NoWriteIdentity(MillstreamError):
    """A streaming write has no query id or batch id in its task, so a replay could not be recognised."""


class MissingCommitMessage(MillstreamError):
    """Some tasks of a write sent no commit message, so the write fails. It may be repeated: stored rows are not added
    again."""

    def __init__(self, write: str, tasks: int) -> None:
        super().__init__(
            f"{write}: {tasks} task(s) did not report what they wrote, so the write failed. Repeat it.",
            tasks=tasks,
        )


class RowsMiscounted(MillstreamError):
    """The server did not confirm as many rows as the task received. The task fails, and may be retried."""

    def __init__(self, given: int, confirmed: int, **facts: Any) -> None:
        super().__init__(
            f"the task received {given} rows, but the server confirmed {confirmed}, so the task fails. "
            "Please report this with the stream's XINFO.",
            given=given,
            confirmed=confirmed,
            **facts,
        )
