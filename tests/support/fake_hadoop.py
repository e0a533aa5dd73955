"""Hadoop file systems in memory, behind the part of py4j and of the Hadoop API that ``millstream.storage`` uses.

The contract that verifies it is the one that runs against real HDFS and S3 (``tests/spark/storage``).
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit


class JavaError(Exception):
    """As py4j raises an exception of the JVM."""

    def __init__(self, kind: str, message: str = "", cause: JavaError | None = None) -> None:
        super().__init__(f"{kind}: {message}")
        self.java_exception = SimpleNamespace(
            getClass=lambda: SimpleNamespace(getSimpleName=lambda: kind),
            getMessage=lambda: message,
            getCause=lambda: None if cause is None else cause.java_exception,
        )


class FakeHadoop:
    """A py4j gateway. ``fail(call, error)`` makes the next call of this name raise, ``lose_reply`` after it
    was applied. ``then(call, action)`` runs an action after it.

    A store whose scheme is in ``object_stores`` shows an object when its stream is closed; the others show it at once.
    A store whose scheme is in ``non_atomic`` replaces by a deletion, which is the call ``replace``, and a rename.
    """

    object_stores = ("s3a", "gs")
    non_atomic = ("abfss", "webhdfs")

    def __init__(self) -> None:
        self.files: dict[str, tuple[bytes, int]] = {}
        self.directories: set[str] = set()
        self.lock = threading.RLock()
        self.settings: dict[str, str] = {}
        self.remaining = 1 << 40
        self._clock = itertools.count(int(time.time() * 1000))
        self._before: dict[str, JavaError] = {}
        self._after: dict[str, JavaError] = {}
        self._then: dict[str, Callable[[], None]] = {}
        self.new_array = lambda kind, length: [None] * length
        self.jvm = self._jvm()

    def fail(self, call: str, error: JavaError) -> None:
        self._before[call] = error

    def lose_reply(self, call: str, error: JavaError) -> None:
        self._after[call] = error

    def then(self, call: str, action: Callable[[], None]) -> None:
        self._then[call] = action

    def called(self, call: str, apply: Callable[[], Any]) -> Any:
        with self.lock:
            if call in self._before:
                raise self._before.pop(call)
            result = apply()
            self._then.pop(call, lambda: None)()
            if call in self._after:
                raise self._after.pop(call)
            return result

    def store(self, path: str, content: bytes) -> None:
        self.files[path] = (content, next(self._clock))
        parent = path.rpartition("/")[0]
        while not parent.rpartition("/")[0].endswith((":/", ":")):
            self.directories.add(parent)
            parent = parent.rpartition("/")[0]

    def _jvm(self) -> Any:
        hadoop = SimpleNamespace(
            fs=SimpleNamespace(
                Path=str,
                FileSystem=SimpleNamespace(newInstance=lambda uri, conf: self.called("open", lambda: _Fs(self, uri))),
                FileContext=SimpleNamespace(getFileContext=lambda uri, conf: _Context(self, uri)),
                Options=SimpleNamespace(Rename=SimpleNamespace(OVERWRITE="OVERWRITE", NONE="NONE")),
            ),
            conf=SimpleNamespace(Configuration=lambda value: value),
            io=SimpleNamespace(IOUtils=SimpleNamespace(copyBytes=_copy)),
        )
        commons = SimpleNamespace(io=SimpleNamespace(IOUtils=SimpleNamespace(copyLarge=_copy_range)))
        configuration = SimpleNamespace(getPropertySources=lambda name: None, set=self.settings.__setitem__)
        active = SimpleNamespace(isDefined=lambda: False)
        module = SimpleNamespace(**{"MODULE$": SimpleNamespace(getActive=lambda: active)})
        spark = SimpleNamespace(
            SparkConf=lambda: None,
            deploy=SimpleNamespace(
                SparkHadoopUtil=SimpleNamespace(
                    get=lambda: SimpleNamespace(newConfiguration=lambda conf: configuration)
                )
            ),
            **{"SparkContext$": module},
        )
        files = SimpleNamespace(FileInputStream=partial(open, mode="rb"), FileOutputStream=partial(open, mode="wb"))
        return SimpleNamespace(
            org=SimpleNamespace(apache=SimpleNamespace(hadoop=hadoop, spark=spark, commons=commons)),
            java=SimpleNamespace(net=SimpleNamespace(URI=SimpleNamespace(create=str)), io=files),
            scala=SimpleNamespace(runtime=SimpleNamespace(ScalaRunTime=SimpleNamespace(stringOf=_texts))),
        )


def _texts(entries: list[_Status]) -> str:
    return f"Array({', '.join(entry.toString() for entry in entries)})"


def _copy(source: Any, target: Any, buffer_size: int, close: bool) -> None:
    """The overload with an int, which is the size of a buffer: it copies to the end."""
    assert 0 < buffer_size <= 1 << 20
    target.write(source.read() if hasattr(source, "read") else source.readNBytes(1 << 40))


def _copy_range(source: Any, target: Any, skip: int, count: int) -> None:
    source.readNBytes(skip)
    target.write(source.readNBytes(count))


class _Status:
    def __init__(self, path: str, size: int | None, modified: int) -> None:
        self._path, self._size, self._modified = path, size, modified

    def getLen(self) -> int:  # Java's name
        return self._size or 0

    def toString(self) -> str:  # Java's name
        length = "" if self._size is None else f" length={self._size};"
        return (
            f"FileStatus{{path={self._path}; isDirectory={str(self._size is None).lower()};{length}"
            f" modification_time={self._modified}; access_time=0; owner=root}}"
        )


class _Fs:
    def __init__(self, hadoop: FakeHadoop, uri: str) -> None:
        self._hadoop = hadoop
        self._object_store = urlsplit(uri).scheme in hadoop.object_stores

    def getFileStatus(self, path: str) -> _Status:  # Java's name
        return self._hadoop.called("getFileStatus", lambda: self._status(path))

    def _status(self, path: str) -> _Status:
        if path in self._hadoop.files:
            content, modified = self._hadoop.files[path]
            return _Status(path, len(content), modified)
        if path in self._hadoop.directories or any(name.startswith(path + "/") for name in self._hadoop.files):
            return _Status(path, None, 1)
        raise JavaError("FileNotFoundException", f"{path} does not exist")

    def exists(self, path: str) -> bool:
        try:
            self._status(path)
        except JavaError:
            return False
        return True

    def listStatus(self, path: str) -> list[_Status]:  # Java's name
        def found() -> list[_Status]:
            self._status(path)
            names = {
                name[len(path) + 1 :].partition("/")[0]
                for name in (*self._hadoop.files, *self._hadoop.directories)
                if name.startswith(path + "/")
            }
            return [self._status(f"{path}/{name}") for name in names]

        return self._hadoop.called("listStatus", found)

    def open(self, path: str) -> _Input:
        def opened() -> _Input:
            if path not in self._hadoop.files:
                raise JavaError("FileNotFoundException", f"{path} does not exist")
            return _Input(self._hadoop.files[path][0])

        return self._hadoop.called("read", opened)

    def createFile(self, path: str) -> _Builder:  # Java's name
        return _Builder(self._hadoop, path, self._object_store)

    def delete(self, path: str, recursive: bool) -> bool:
        def deleted() -> bool:
            inside = [name for name in self._hadoop.files if name == path or name.startswith(path + "/")]
            for name in inside:
                del self._hadoop.files[name]
            self._hadoop.directories -= {
                name for name in self._hadoop.directories if (name + "/").startswith(path + "/")
            }
            return bool(inside)

        return self._hadoop.called("delete", deleted)

    def mkdirs(self, path: str) -> bool:
        return self._hadoop.called("mkdirs", lambda: self._hadoop.directories.add(path) is None)

    def getStatus(self, path: str) -> Any:  # Java's name
        remaining = self._hadoop.remaining
        return SimpleNamespace(getRemaining=lambda: remaining, getCapacity=lambda: 1 << 40 if remaining else 0)


class _Builder:
    def __init__(self, hadoop: FakeHadoop, path: str, object_store: bool) -> None:
        self._hadoop, self._path, self._object_store = hadoop, path, object_store
        self._replace = self._conditional = False

    def overwrite(self, replace: bool) -> _Builder:
        self._replace = replace
        return self

    def recursive(self) -> _Builder:
        return self

    def must(self, option: str, value: bool) -> _Builder:
        self._conditional = True
        return self

    def build(self) -> _Output:
        def built() -> _Output:
            if not self._object_store:
                if not self._replace and self._path in self._hadoop.files:
                    raise JavaError("FileAlreadyExistsException", self._path)
                self._hadoop.store(self._path, b"")
            return _Output(self._hadoop, self._path, self._object_store, if_absent=not self._replace)

        return self._hadoop.called("create", built)


class _Output:
    def __init__(self, hadoop: FakeHadoop, path: str, object_store: bool, *, if_absent: bool) -> None:
        self._hadoop, self._path, self._object_store, self._if_absent = hadoop, path, object_store, if_absent
        self._content = bytearray()

    def write(self, content: bytes) -> None:
        def written() -> None:
            self._content.extend(content)
            if not self._object_store:
                self._hadoop.store(self._path, bytes(self._content))

        self._hadoop.called("write", written)

    def hasCapability(self, name: str) -> bool:  # Java's name
        return not self._object_store

    def hsync(self) -> None:
        self._hadoop.called("hsync", lambda: None)

    def abort(self) -> None:
        self._content.clear()

    def close(self) -> None:
        def closed() -> None:
            if self._object_store:
                if self._if_absent and self._path in self._hadoop.files:
                    raise JavaError("FileAlreadyExistsException", f"{self._path}: 412 Precondition Failed")
                self._hadoop.store(self._path, bytes(self._content))

        self._hadoop.called("close", closed)


class _Input:
    def __init__(self, content: bytes) -> None:
        self._content, self._at = content, 0

    def seek(self, at: int) -> None:
        self._at = at

    def readNBytes(self, count: int) -> bytes:  # Java's name
        result = self._content[self._at : self._at + count]
        self._at += len(result)
        return result

    def close(self) -> None:
        pass


class _Context:
    def __init__(self, hadoop: FakeHadoop, uri: str) -> None:
        self._hadoop = hadoop
        self._atomic = urlsplit(uri).scheme not in hadoop.non_atomic

    def rename(self, source: str, target: str, options: list[str]) -> None:
        def deleted() -> None:
            self._hadoop.files.pop(target, None)

        def renamed() -> None:
            if options[0] == "NONE" and target in self._hadoop.files:
                raise JavaError("FileAlreadyExistsException", target)
            if source not in self._hadoop.files:
                raise JavaError("FileNotFoundException", f"{source} does not exist")
            self._hadoop.files[target] = self._hadoop.files.pop(source)

        if options[0] == "OVERWRITE" and not self._atomic:
            self._hadoop.called("replace", deleted)
        self._hadoop.called("rename", renamed)
