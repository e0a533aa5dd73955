"""What can go wrong with an assignment that another member, or the caller, can cause."""

from __future__ import annotations

from millstream.errors import MillstreamError


class StreamIsOwned(MillstreamError):
    """The stream was claimed while a living member holds it. ``owner`` names the member."""

    stream: str
    owner: str

    def __init__(self, stream: str, owner: str) -> None:
        super().__init__(
            f"stream {stream!r} is owned by {owner!r}, whose lease is alive. Wait for StreamExpired.",
            stream=stream,
            owner=owner,
        )


class NotTheOwner(MillstreamError):
    """This member does not own the stream (any more); nothing was changed."""

    stream: str

    def __init__(self, stream: str) -> None:
        super().__init__(
            f"this member does not own stream {stream!r}. Act only between its StreamAdded and its StreamDisowned.",
            stream=stream,
        )


class MalformedAnnouncement(MillstreamError):
    """An entry of the load-balancer stream is not an announcement. It was buried; the reader went on."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"not an announcement: {reason}. "
            'Write one field lbs-input that holds {"DataStreamName": "...", "Info": {...}}.',
            reason=reason,
        )


class MemberClosed(MillstreamError):
    """The client was closed, or not started yet, or started twice."""
