"""Storage in any file system that Hadoop has a connector for, through the Hadoop FileSystem API of Spark's JVM.

How an object becomes visible (``_PUT_IS_ATOMIC`` lists the schemes of the first kind):

- Object stores: the object appears when its stream is closed. ``write`` replaces. ``create`` is a conditional PUT,
  which the store refuses if the name exists (S3: ``If-None-Match: *``).
- All others: a temporary file, hsync, and a rename. ``write`` renames with OVERWRITE; ``create`` without, which fails
  if the name exists. HDFS replaces in one step. Others (Azure, WebHDFS) delete the old object and then rename: for a
  moment there is none, and a writer that is killed at that moment leaves only the temporary file.
"""

from __future__ import annotations

import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Any, Final
from urllib.parse import urlsplit

from millstream.storage.errors import StorageUnavailable
from millstream.storage.hadoop_errors import is_missing, name_exists, translated, unless
from millstream.storage.storage import Buffer, Storage, StoredObject

_PUT_IS_ATOMIC: Final = frozenset({"s3a", "gs"})
_CONDITIONAL_PUT: Final = "fs.option.create.conditional.overwrite"
_TEMPORARY: Final = ".writing-"
_MAX_BYTES_PER_CALL: Final = 1 << 18
"""py4j sends bytes as base64 text, at 15 to 40 MB/s. Larger contents pass through a private temporary file of this
host, which the JVM reads or writes."""
_COPY_BYTES: Final = 1 << 20
_BOUNDED_WAITS: Final = {
    # A namenode that refuses connections: 10 attempts, 1 s apart. One that does not answer: 3 times 10 s.
    "ipc.client.connect.max.retries": "10",
    "ipc.client.connect.max.retries.on.timeouts": "3",
    "ipc.client.connect.timeout": "10000",
    "ipc.client.rpc-timeout.ms": "60000",
    "dfs.client.socket-timeout": "30000",
    "fs.s3a.attempts.maximum": "5",
    "fs.s3a.connection.establish.timeout": "10s",
}
"""For settings that the user has not made. Callers repeat what failed, so no single call may wait for long."""
_STATUS: Final = re.compile(
    r"path=(?P<path>[^;]*); isDirectory=(?P<directory>true|false);(?: length=(?P<size>\d+);)?.*?"
    r"modification_time=(?P<modified>-?\d+)"
)


class HadoopStorage(Storage):
    is_local = False

    def __init__(self, location: str, gateway: Callable[[], Any], client: HadoopClient | None = None) -> None:
        self.location = location
        self._gateway = gateway
        self._client = client or HadoopClient(location, gateway)

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        with self._client.use(self.uri(name)) as fs:
            try:
                return fs.read(self.uri(name), offset, length)
            except Exception as error:  # of py4j, see ``is_missing``
                if fs.put_is_atomic and is_missing(error):
                    # A HEAD request has the same reply if the bucket is missing. This call lists, and then raises.
                    fs.stat(self.uri(name))
                raise

    def write(self, name: str, *parts: Buffer) -> None:
        with self._client.use(self.uri(name)) as fs:
            if fs.put_is_atomic:
                fs.put(self.uri(name), parts, replace=True)
            else:
                self._replace(fs, self._temporary(fs, name, parts), self.uri(name))

    def create(self, name: str, *parts: Buffer) -> bool:
        if self.exists(name):
            return False  # saves the transfer; the decision is made below, by the store
        with self._client.use(self.uri(name)) as fs:
            if fs.put_is_atomic:
                return fs.put(self.uri(name), parts, replace=False)
            temporary = self._temporary(fs, name, parts)
            try:
                # The name of the temporary file is random. If it is gone after a refusal, an earlier attempt of this
                # call was applied and its reply was lost.
                return fs.rename(temporary, self.uri(name), replace=False) or not fs.exists(temporary)
            finally:
                fs.discard(temporary)

    def _temporary(self, fs: _FileSystem, name: str, parts: tuple[Buffer, ...]) -> str:
        """Writes a complete, invisible file next to the object. Returns its URI."""
        parent, _, last = name.rpartition("/")
        temporary = self.uri(f"{parent}/" * bool(parent) + f"{_TEMPORARY}{last}.{token_hex(6)}")
        try:
            if not fs.put(temporary, parts, replace=False):
                raise FileExistsError(temporary)
        except BaseException:  # also after an interruption
            fs.discard(temporary)
            raise
        return temporary

    def _replace(self, fs: _FileSystem, temporary: str, target: str) -> None:
        """Renames over the target. A store that cannot do that in one step deletes the target first. If its rename
        then fails, the temporary file has the only content: it is kept, and the rename is tried once more."""
        try:
            fs.rename(temporary, target, replace=True)
        except Exception:  # of any kind: what counts is whether the target is there
            if fs.exists(target):
                fs.discard(temporary)
                raise
            if not fs.rename(temporary, target, replace=False):
                raise

    def delete(self, name: str) -> None:
        with self._client.use(self.uri(name)) as fs:
            fs.delete(self.uri(name))

    def list(self, name: str = "") -> list[StoredObject]:
        with self._client.use(self.uri(name)) as fs:
            entries = fs.list(self.uri(name))
        return sorted((e for e in entries if not e.name.startswith(_TEMPORARY)), key=lambda entry: entry.name)

    def stat(self, name: str) -> StoredObject | None:
        with self._client.use(self.uri(name)) as fs:
            return fs.stat(self.uri(name))

    def fetch(self, name: str, target: Path) -> None:
        with self._client.use(self.uri(name)) as fs:
            fs.fetch(self.uri(name), target)

    def persist(self, name: str) -> None:
        """Does nothing: a file is replicated, or stored in the object store, when its writer has closed it."""

    def make(self) -> None:
        with self._client.use(self.location) as fs:
            fs.make(self.location)

    def free_bytes(self) -> int | None:
        with self._client.use(self.location) as fs:
            return None if fs.put_is_atomic else fs.free_bytes(self.location)

    def directory(self, name: str) -> Storage:
        return HadoopStorage(self.uri(name), self._gateway, self._client)


class HadoopClient:
    """One Hadoop FileSystem of the JVM, created on first use."""

    def __init__(self, location: str, gateway: Callable[[], Any]) -> None:
        self._location = location
        self._gateway = gateway
        self._lock = threading.Lock()
        self._opened: _FileSystem | None = None

    @contextmanager
    def use(self, location: str) -> Iterator[_FileSystem]:
        """Errors of the JVM become errors of storage that name ``location``."""
        try:
            with self._lock:
                if self._opened is None:
                    self._opened = _FileSystem(self._location, self._gateway())
            yield self._opened
        except Exception as error:  # see ``translated``
            raise translated(error, location) from error


class _FileSystem:
    """The calls into the JVM. Raises what py4j raises."""

    def __init__(self, location: str, gateway: Any) -> None:
        self._scheme = urlsplit(location).scheme.lower()
        self._gateway = gateway
        self._jvm = jvm = gateway.jvm
        self._path = jvm.org.apache.hadoop.fs.Path
        conf = _configuration(jvm)
        uri = jvm.java.net.URI.create(location)
        # A client of its own: Spark shares one per store and user, with the settings of the first caller.
        self._fs = jvm.org.apache.hadoop.fs.FileSystem.newInstance(uri, conf)
        self._context: Any = None
        if not self.put_is_atomic:
            self._context = jvm.org.apache.hadoop.fs.FileContext.getFileContext(uri, conf)
            rename = jvm.org.apache.hadoop.fs.Options.Rename
            self._renames = {}
            for replace in (False, True):
                options = gateway.new_array(rename, 1)
                options[0] = rename.OVERWRITE if replace else rename.NONE
                self._renames[replace] = options

    @property
    def put_is_atomic(self) -> bool:
        return self._scheme in _PUT_IS_ATOMIC

    def read(self, uri: str, offset: int, length: int | None) -> bytes:
        path = self._path(uri)
        if offset == 0 and length is None:
            return self._read_whole(path)
        size = int(self._fs.getFileStatus(path).getLen())
        remaining = max(0, size - offset) if length is None else max(0, min(length, size - offset))
        with self._stream(path) as stream:
            stream.seek(offset if remaining else 0)
            if remaining > _MAX_BYTES_PER_CALL:
                data = self._through_file(lambda out: self._copy_range(stream, out, remaining))
            else:
                data = bytes(stream.readNBytes(remaining))
        if len(data) != remaining:
            raise EOFError(f"{len(data)} of {remaining} bytes were read")
        return data

    def _read_whole(self, path: Any) -> bytes:
        """To the end of the stream. A size that was read before may be that of an object which was replaced since."""
        with self._stream(path) as stream:
            first = bytes(stream.readNBytes(_MAX_BYTES_PER_CALL))
            if len(first) < _MAX_BYTES_PER_CALL:
                return first
            return first + self._through_file(lambda out: self._copy_to_end(stream, out))

    def fetch(self, uri: str, target: Path) -> None:
        path = self._path(uri)
        size = int(self._fs.getFileStatus(path).getLen())
        with self._stream(path) as stream:
            os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            with self._file_output(str(target)) as out:
                self._copy_to_end(stream, out)
        if target.stat().st_size != size:
            raise EOFError(f"{target.stat().st_size} of {size} bytes were read")

    @contextmanager
    def _stream(self, path: Any) -> Iterator[Any]:
        stream = self._fs.open(path)
        try:
            yield stream
        finally:
            stream.close()

    @contextmanager
    def _file_output(self, name: str) -> Iterator[Any]:
        out = self._jvm.java.io.FileOutputStream(name)
        try:
            yield out
        finally:
            out.close()

    def _through_file(self, copy: Callable[[Any], None]) -> bytes:
        with tempfile.NamedTemporaryFile(prefix="millstream-") as file:
            with self._file_output(file.name) as out:
                copy(out)
            return file.read()

    def _copy_to_end(self, stream: Any, out: Any) -> None:
        self._jvm.org.apache.hadoop.io.IOUtils.copyBytes(stream, out, _COPY_BYTES, False)

    def _copy_range(self, stream: Any, out: Any, length: int) -> None:
        # Not Hadoop's IOUtils: py4j sends a number as an int, and Hadoop takes an int as the size of a buffer.
        self._jvm.org.apache.commons.io.IOUtils.copyLarge(stream, out, 0, length)

    def _write(self, stream: Any, parts: tuple[Buffer, ...]) -> None:
        views = [memoryview(part).cast("B") for part in parts]
        if sum(map(len, views)) <= _MAX_BYTES_PER_CALL:
            stream.write(bytearray(b"".join(views)))
            return
        with tempfile.NamedTemporaryFile(prefix="millstream-") as file:
            for view in views:
                file.write(view)
            file.flush()
            source = self._jvm.java.io.FileInputStream(file.name)
            try:
                self._jvm.org.apache.hadoop.io.IOUtils.copyBytes(source, stream, _COPY_BYTES, False)
            finally:
                source.close()

    def put(self, uri: str, parts: tuple[Buffer, ...], *, replace: bool) -> bool:
        """False if the store refused, because the name exists and must not be replaced."""
        path = self._path(uri)
        builder = self._fs.createFile(path).overwrite(replace).recursive()
        if not replace and self._scheme == "s3a":
            # `must`: a connector that does not know this option fails instead of replacing.
            builder = builder.must(_CONDITIONAL_PUT, True)
        with unless(lambda error: not replace and name_exists(error)):
            stream = builder.build()
            try:
                self._write(stream, parts)
                if stream.hasCapability("hsync") and not self.put_is_atomic:
                    stream.hsync()
            except BaseException:  # also after an interruption: nothing incomplete is published
                self._abort(stream)
                raise
            stream.close()
            return True
        return False

    def _abort(self, stream: Any) -> None:
        """Closing would publish what an object store has received so far. The error in progress matters more than one
        of this call."""
        with suppress(Exception):
            stream.abort() if self.put_is_atomic else stream.close()

    def rename(self, source: str, target: str, *, replace: bool) -> bool:
        with unless(lambda error: not replace and name_exists(error)):
            self._context.rename(self._path(source), self._path(target), self._renames[replace])
            return True
        return False

    def exists(self, uri: str) -> bool:
        return bool(self._fs.exists(self._path(uri)))

    def delete(self, uri: str) -> None:
        path = self._path(uri)
        if not self._fs.delete(path, True) and self._fs.exists(path):
            raise OSError("the store did not delete it")

    def discard(self, uri: str) -> None:
        """Removes a temporary file, if the store allows it now. It is invisible, and an earlier error matters more."""
        with suppress(Exception):
            self.delete(uri)

    def list(self, uri: str) -> list[StoredObject]:
        with unless(is_missing):
            statuses = self._fs.listStatus(self._path(uri))
            # The text of all entries in one call: py4j takes a round trip for each method of each entry.
            return list(_stored(str(self._jvm.scala.runtime.ScalaRunTime.stringOf(statuses))))
        return []

    def stat(self, uri: str) -> StoredObject | None:
        with unless(is_missing):
            return next(_stored(str(self._fs.getFileStatus(self._path(uri)).toString())))
        return None

    def make(self, uri: str) -> None:
        self._fs.mkdirs(self._path(uri))

    def free_bytes(self, uri: str) -> int:
        status = self._fs.getStatus(self._path(uri))
        if not status.getCapacity():
            # Not full: the caller must wait, not remove something.
            raise StorageUnavailable(uri, "no datanode is alive. Check that they run")
        return int(status.getRemaining())


def _configuration(jvm: Any) -> Any:
    """A copy of the running session's Hadoop settings, or the JVM's own if there is no session, with bounded waits."""
    active = getattr(getattr(jvm.org.apache.spark, "SparkContext$"), "MODULE$").getActive()
    if active.isDefined():
        base = active.get().hadoopConfiguration()
    else:
        base = jvm.org.apache.spark.deploy.SparkHadoopUtil.get().newConfiguration(jvm.org.apache.spark.SparkConf())
    conf = jvm.org.apache.hadoop.conf.Configuration(base)
    for name, value in _BOUNDED_WAITS.items():
        sources = conf.getPropertySources(name)
        if sources is None or all(str(source).endswith("-default.xml") for source in sources):
            conf.set(name, value)
    return conf


def _stored(text: str) -> Iterator[StoredObject]:
    """From the text of FileStatus objects. It has the same form for every store."""
    for status in _STATUS.finditer(text):
        is_directory = status["directory"] == "true"
        name = status["path"].rstrip("/").rpartition("/")[2]
        size = 0 if is_directory else int(status["size"] or 0)
        yield StoredObject(name, size, int(status["modified"]), is_directory)
