"""What an exception of the JVM means for a caller of storage."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import urlsplit

from millstream.storage.errors import (
    ConnectorMissing,
    InvalidLocation,
    ObjectMissing,
    StorageDenied,
    StorageError,
    StorageFull,
    StorageUnavailable,
)

_JARS: Final = {
    "s3a": "org.apache.hadoop:hadoop-aws",
    "abfs": "org.apache.hadoop:hadoop-azure",
    "abfss": "org.apache.hadoop:hadoop-azure",
    "gs": "com.google.cloud.bigdataoss:gcs-connector",
}
_SHIPPED: Final = "hdfs, viewfs, webhdfs"
_MISSING: Final = ("FileNotFoundException", "NoSuchFileException")
_NO_CONNECTOR: Final = ("UnsupportedFileSystemException", "ClassNotFoundException", "NoClassDefFoundError")
_DENIED: Final = (
    "AccessControlException",
    "AccessDeniedException",
    "NoAuthWithAWSException",
    "CredentialInitializationException",
    "NoAwsCredentialsException",
    "UnknownStoreException",
    "AWSNoAccessException",
    "AuthorizationException",
)
_FULL: Final = (
    "QuotaExceededException",
    "DSQuotaExceededException",
    "NSQuotaExceededException",
    "QuotaByStorageTypeExceededException",
    "DiskOutOfSpaceException",
    "OutOfSpaceException",
)
_FULL_WORDS: Final = ("No space left", "InsufficientStorage", "QuotaExceeded")
_UNAVAILABLE: Final = (
    "ConnectException",
    "SocketException",
    "SocketTimeoutException",
    "ConnectTimeoutException",
    "UnknownHostException",
    "NoRouteToHostException",
    "EOFException",
    "InterruptedIOException",
    "ClosedByInterruptException",
    "RetriableException",
    "StandbyException",
    "SafeModeException",
    "AWSClientIOException",
    "AWSServiceIOException",
    "AWSServiceThrottledException",
    "AWSStatus500Exception",
    "BlockMissingException",
    "RemoteException",
    "IOException",
)


def translated(error: Exception, location: str) -> Exception:
    """An error of storage; ``error`` itself if it is one."""
    if isinstance(error, StorageError | InvalidLocation):
        return error
    thrown = list(_chain(getattr(error, "java_exception", None)))
    if not thrown:
        return _without_java(error, location)
    names = [name for name, _ in thrown]
    text = (thrown[-1][1] or thrown[0][1]).rstrip(".")
    everything = " ".join(message for _, message in thrown)
    if _any(names, _NO_CONNECTOR):
        return _no_connector(location)
    if _any(names, _FULL) or any(word in everything for word in _FULL_WORDS):
        return StorageFull(location, f"the store is full: {text}. Free some space, or raise the quota")
    if _any(names, _DENIED):
        return StorageDenied(
            location, f"the store refuses: {text}. Check credentials, permissions and the bucket's name"
        )
    if _any(names, _MISSING):
        return ObjectMissing(location)
    if _any(names, _UNAVAILABLE):
        return StorageUnavailable(location, f"the store does not answer: {names[-1]}: {text}. Check that it runs")
    return StorageError(location, f"{names[0]}: {text}. Check the location and its settings in spark.conf")


def is_missing(error: Exception) -> bool:
    """Whether there is no object of the name."""
    return isinstance(translated(error, ""), ObjectMissing)


def name_exists(error: Exception) -> bool:
    """Whether the store refused to create an object because its name exists.

    S3 reports that as status 412, which the connector wraps in one of several classes.
    """
    thrown = list(_chain(getattr(error, "java_exception", None)))
    if _any([name for name, _ in thrown], ("FileAlreadyExistsException", "RemoteFileChangedException")):
        return True
    return any("Status Code: 412" in message for _, message in thrown)


@contextmanager
def unless(refusal: Callable[[Exception], bool]) -> Iterator[None]:
    """Ends the block after an error that is this refusal: then the code after the block runs. Raises all others."""
    try:
        yield
    except Exception as error:  # py4j's: this package does not import it, because local files need no Spark
        if not refusal(error):
            raise


def _no_connector(location: str) -> ConnectorMissing:
    scheme = urlsplit(location).scheme
    jar = _JARS.get(scheme)
    if jar is None:
        schemes = ", ".join(("file", _SHIPPED, *sorted(_JARS)))
        return ConnectorMissing(
            location, f"Spark has no connector for {scheme}. Use one of {schemes}, or install its jar"
        )
    install = f"spark.conf: {{spark.jars.packages: {jar}:<version>}}"
    return ConnectorMissing(location, f"Spark has no connector for {scheme}. Give its jar to Spark: {install}")


def _without_java(error: Exception, location: str) -> Exception:
    """What py4j raises if the JVM has ended or the connection broke, and what this package raises by itself."""
    kind = type(error).__name__
    lost = kind == "Py4JNetworkError" or (kind == "Py4JError" and "Answer from Java side is empty" in str(error))
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return StorageFull(location, f"no space for a temporary file in {tempfile.gettempdir()}. Free some")
    if lost or isinstance(error, ConnectionError):
        return StorageUnavailable(location, f"the JVM on this host does not answer: {kind}: {error}")
    if isinstance(error, OSError | EOFError):
        return StorageUnavailable(location, f"{error}. Check the store")
    return error


def _chain(thrown: Any) -> Iterator[tuple[str, str]]:
    """The class and first line of a Java exception and of its causes."""
    for _ in range(12):
        if thrown is None:
            return
        lines = str(thrown.getMessage() or "").splitlines() or [""]
        yield str(thrown.getClass().getSimpleName()), lines[0][:300]
        thrown = thrown.getCause()


def _any(names: list[str], known: tuple[str, ...]) -> bool:
    return any(name in known for name in names)
