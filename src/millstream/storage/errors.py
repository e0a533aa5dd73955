"""Errors of storage. Each names the store and the path; none holds a secret."""

from __future__ import annotations

from millstream.errors import InvalidArgument, MillstreamError


class InvalidLocation(InvalidArgument):
    """The location has an unknown scheme, or is no location."""


class StorageError(MillstreamError):
    """The store did not do what was asked. ``location`` is the path or URI."""

    location: str

    def __init__(self, location: str, why: str) -> None:
        super().__init__(f"{location}: {why}", location=location)


class ConnectorMissing(StorageError):
    """The JVM has no Hadoop connector for this scheme. The message says which jar to install."""


class ObjectMissing(StorageError):
    """There is no object of this name."""

    def __init__(self, location: str) -> None:
        super().__init__(location, "there is no such file")


class StorageDenied(StorageError):
    """The store refuses: no credentials, wrong ones, no permission, or no such bucket. A retry does not help."""


class StorageFull(StorageError):
    """No space, or a quota is used up. A retry helps once space was freed."""

    retryable = True


class StorageUnavailable(StorageError):
    """The store does not answer, or was restarted during the call. A retry may succeed."""

    retryable = True
