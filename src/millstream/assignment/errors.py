"""Errors of assignments that another member or the caller can cause."""

from __future__ import annotations

from millstream.errors import MillstreamError


class StreamIsOwned(MillstreamError):
    """The stream could not be claimed, because a live member owns it: ``owner``."""

    stream: str
    owner: str

    def __init__(self, stream: str, owner: str) -> None:
        super().__init__(
            f"stream {stream!r} is owned by {owner!r}, whose lease has not expired. Wait for StreamExpired.",
            stream=stream,
            owner=owner,
        )


class NotTheOwner(MillstreamError):
    """This member does not own the stream, or no longer owns it. Nothing was changed."""

    stream: str

    def __init__(self, stream: str) -> None:
        super().__init__(
            f"this member does not own stream {stream!r}. Act only between its StreamAdded and its StreamDisowned.",
            stream=stream,
        )


class MalformedAnnouncement(MillstreamError):
    """An entry of the load-balancer stream is not an announcement. Members dead-letter it and continue."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"not an announcement: {reason}. "
            'Write one field lbs-input with {"DataStreamName": "...", "Info": {...}}.',
            reason=reason,
        )


class MalformedOwnerRecord(MillstreamError):
    """An owner record that no member wrote: its stream cannot be owned. Other streams are not affected."""

    record: bytes

    def __init__(self, record: bytes) -> None:
        super().__init__(
            f"the owner record does not consist of a number and a member name: {record[:100]!r}. Find what wrote "
            "it, then delete the key {stream}.owner.",
            record=record,
        )


class MemberClosed(MillstreamError):
    """The client was closed, was not started, or was started twice."""
