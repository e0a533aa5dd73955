"""Which storage a location means."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote, urlsplit

from millstream.storage.errors import InvalidLocation
from millstream.storage.hadoop import HadoopStorage
from millstream.storage.local import LocalStorage
from millstream.storage.storage import Storage

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


_STORES = ("hdfs", "viewfs", "webhdfs", "swebhdfs", "s3a", "abfs", "abfss", "gs", "ofs")
_ONE_SLASH = re.compile(rf"(file|{'|'.join(_STORES)}):/(?!/)", re.IGNORECASE)


def check_location(location: str) -> None:
    """Raises InvalidLocation if the scheme is not one of a known store. Nothing is contacted."""
    match = _SCHEME.match(location)
    if match is None:
        one_slash = _ONE_SLASH.match(location)
        if one_slash is not None:  # Java accepts it; here it would be a relative path
            raise InvalidLocation("location", location, f"{one_slash[1].lower()}:// and a host, or a third slash")
        return
    scheme = match[1].lower()
    if scheme == "file":
        local_path(location)
    elif scheme in ("s3", "s3n"):
        raise InvalidLocation("location", location, "the scheme of Hadoop's S3 connector, s3a://bucket/directory")
    elif scheme not in _STORES:
        raise InvalidLocation("location", location, f"a directory, or a scheme of {', '.join(('file', *_STORES))}")
    elif not urlsplit(location).netloc and scheme not in ("hdfs", "viewfs"):
        raise InvalidLocation("location", location, f"{scheme}://<bucket or host>/<directory>")


def local_path(location: str) -> str:
    """The path in a ``file://`` URI."""
    parts = urlsplit(location)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise InvalidLocation("location", location, "file:///directory")
    if {"?", "#"}.intersection(location):  # the rest would be ignored, and the path would be that of another directory
        raise InvalidLocation("location", location, "file:///directory, with %3F for ? and %23 for #")
    return f"/{unquote(parts.path).lstrip('/')}"


def is_file_uri(location: str) -> bool:
    """Whether the location is a ``file://`` URI."""
    match = _SCHEME.match(location)
    return match is not None and match[1].lower() == "file"


def has_scheme(location: str) -> bool:
    """Whether the location is in a store that is reached through Spark's JVM. ``file://`` is a local path."""
    match = _SCHEME.match(location)
    return match is not None and match[1].lower() != "file"


def for_spark(location: str) -> str:
    """The location as Spark needs it: without a scheme it would mean a directory of Hadoop's default file system, which
    is HDFS where Hadoop is configured so."""
    return location if _SCHEME.match(location) else f"file://{location}"


def open_storage(location: str | os.PathLike[str], jvm: Callable[[], Any] | None = None) -> Storage:
    """The storage at a path, ``file://`` URI, or URI of any Hadoop file system.

    ``jvm`` returns py4j's view of a JVM that has the store's connector; see ``gateway.connect``. It is called on the
    first access to a store with a scheme, and needed only for such stores. Nothing is contacted here.
    """
    text = os.fspath(location)
    if not text:
        raise InvalidLocation("location", text, "a directory or a URI such as hdfs://namenode:8020/directory")
    if has_scheme(text):
        if jvm is None:
            raise InvalidLocation("location", text, "a local directory here: there is no Spark session")
        return HadoopStorage(text.rstrip("/"), jvm)
    return LocalStorage(local_path(text) if is_file_uri(text) else text)
