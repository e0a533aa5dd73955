"""Errors that only the broker raises."""

from __future__ import annotations

from millstream.errors import MillstreamError


class RowsMissing(MillstreamError):
    """append_once: the stream has recorded fewer rows than this writer has already appended.

    A failover lost them, or the writer was silent for so long that its marker was forgotten.
    ``rows`` is what the stream has, ``position`` where the writer is.
    """

    rows: int
    position: int

    def __init__(self, writer: str, *, rows: int, position: int) -> None:
        super().__init__(
            f"writer {writer!r} is at row {position}, but the stream has recorded only {rows} of its rows. "
            "Replay the batch from row 0: what is there will be skipped.",
            writer=writer,
            rows=rows,
            position=position,
        )
