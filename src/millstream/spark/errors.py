"""What can go wrong between Spark and a stream. Messages name the option to change; none of them holds a secret."""

from __future__ import annotations

from typing import Any

from millstream.errors import InvalidArgument, MillstreamError


class InvalidOption(InvalidArgument):
    """An option is missing, unknown, or not what it may be. Raised before any data moves. ``argument`` names it;
    ``got`` is what may be shown of its value: never a secret."""

    def __init__(self, option: str, got: object, allowed: str) -> None:
        super().__init__(f"option {option}", got, allowed)
        self.option = option
        self.got = got


class DataLost(MillstreamError):
    """Entries left the stream before this reader had read them.

    ``lost`` counts them, or is None where nobody can know. ``certain`` is false where entries were deleted one by
    one, which looks the same: then the loss is only possible.
    """

    stream: str
    lost: int | None
    certain: bool

    def __init__(self, stream: str, explanation: str, *, lost: int | None, certain: bool) -> None:
        super().__init__(
            f"{explanation} Let retention see this reader (option group, and trim safely), or set "
            "failOnDataLoss=false to log the gap and go on.",
            stream=stream,
            lost=lost,
            certain=certain,
        )


class MalformedEntry(MillstreamError):
    """mode=FAILFAST, and a field's text is not of its column's type."""


class UnusableRow(MillstreamError):
    """A row cannot become an entry: it holds no field, no stream, or no event id. Nothing of its chunk was written."""


class NoWriteIdentity(MillstreamError):
    """A streaming write found neither query id nor batch id in its task, so a replay could not be recognised."""


class TaskUnheard(MillstreamError):
    """A write is to be committed, but some of its tasks have not said what they wrote. It fails, and may be repeated:
    what is there is not added again."""

    def __init__(self, what: str, tasks: int) -> None:
        super().__init__(
            f"{what}: {tasks} task(s) have not said what they wrote, so the write counts as failed. Repeat it.",
            tasks=tasks,
        )


class RowsMiscounted(MillstreamError):
    """The server confirmed another number of rows than the task was given. The task fails, and may be retried."""

    def __init__(self, given: int, confirmed: int, **facts: Any) -> None:
        super().__init__(
            f"{given} rows were given to the task, but {confirmed} were confirmed; the task fails rather than go on. "
            "Please report this with the stream's XINFO.",
            given=given,
            confirmed=confirmed,
            **facts,
        )
