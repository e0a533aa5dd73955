"""A disk for tests: it records every step, can be full or broken, and can lose power after any step."""

from __future__ import annotations

import errno
import io
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal


@dataclass(slots=True)
class _Content:
    """The bytes of one file, and how many of them survive a power cut."""

    seen: bytearray = field(default_factory=bytearray)
    durable: bytes = b""


OperationFunction = tuple[Literal["write", "sync", "truncate", "replace", "remove"], Path, bytes | int | Path | None]


class SimulatedDisk:
    """Implements the journal's ``Files``. ``steps`` is what happened so far, in order."""

    def __init__(self) -> None:
        self.steps: list[OperationFunction] = []
        self.free_bytes: int | None = None
        """How many more bytes fit; None: any number."""
        self.sync_fails = False
        self.truncate_fails = False
        self.replace_fails = False
        self.directory_sync_fails = False
        self._contents: dict[Path, _Content] = {}

    # --- what the journal calls -------------------------------------------------------------------------------------

    def append_to(self, path: Path) -> SimulatedFile:
        return SimulatedFile(self, path, self._contents.setdefault(path, _Content()))

    def read(self, path: Path) -> IO[bytes]:
        return io.BytesIO(bytes(self._contents[path].seen))

    def size(self, path: Path) -> int:
        return len(self._contents[path].seen) if path in self._contents else 0

    def replace(self, source: Path, target: Path) -> None:
        if self.replace_fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self.steps.append(("replace", source, target))
        self._contents[target] = self._contents.pop(source)

    def remove(self, path: Path) -> None:
        self.steps.append(("remove", path, None))
        self._contents.pop(path, None)

    def sync_directory(self, path: Path) -> None:
        """Names are durable at once. The call can fail, which shows that the journal makes it."""
        if self.directory_sync_fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    # --- what tests do ----------------------------------------------------------------------------------------------

    def content(self, path: Path) -> bytes:
        return bytes(self._contents[path].seen)

    def put(self, path: Path, content: bytes) -> None:
        self._contents[path] = _Content(bytearray(content), content)

    def after_power_cut(self, steps: int | None = None, *, kept: int = 0, zeros: int = 0) -> SimulatedDisk:
        """A disk as it may be found when the power went after so many steps: what was synced is there, and ``kept``
        bytes of what was written since, and ``zeros`` bytes more that the file system had only allocated."""
        replay = SimulatedDisk()
        for kind, path, item in self.steps if steps is None else self.steps[:steps]:
            replay._repeat(kind, path, item)
        for content in replay._contents.values():
            since = bytes(content.seen[len(content.durable) :])
            missing = max(len(since) - kept, 0)
            # A single zero looks like a changed byte, and the journal rejects it.
            content.seen[:] = content.durable + since[:kept] + b"\0" * (min(zeros, missing) if missing > 1 else 0)
            content.durable = bytes(content.seen)
        return replay

    def unsynced(self, path: Path, steps: int | None = None) -> int:
        """How many bytes of the file a power cut after that many steps may lose."""
        replay = SimulatedDisk()
        for kind, where, item in self.steps if steps is None else self.steps[:steps]:
            replay._repeat(kind, where, item)
        content = replay._contents.get(path)
        return len(content.seen) - len(content.durable) if content is not None else 0

    def _repeat(self, kind: str, path: Path, what: bytes | int | Path | None) -> None:
        content = self._contents.setdefault(path, _Content())
        if kind == "write":
            assert isinstance(what, bytes)
            content.seen += what
        elif kind == "sync":
            content.durable = bytes(content.seen)
        elif kind == "truncate":
            assert isinstance(what, int)
            del content.seen[what:]
            content.durable = content.durable[:what]
        elif kind == "replace":
            assert isinstance(what, Path)
            self._contents[what] = self._contents.pop(path)
        else:
            del self._contents[path]


class SimulatedFile:
    def __init__(self, disk: SimulatedDisk, path: Path, content: _Content) -> None:
        self._disk = disk
        self._path = path
        self._content = content

    @property
    def _name(self) -> Path:
        """Where the file is now: it may have been renamed while it was open."""
        for path, content in self._disk._contents.items():
            if content is self._content:
                return path
        return self._path

    def write(self, data: bytes) -> int:
        """A full disk writes as many bytes as fit, and rejects the next write, like a real one."""
        free_bytes = self._disk.free_bytes
        if free_bytes is not None:
            if free_bytes == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            data = data[:free_bytes]
            self._disk.free_bytes = free_bytes - len(data)
        self._disk.steps.append(("write", self._name, data))
        self._content.seen += data
        return len(data)

    def sync(self) -> None:
        if self._disk.sync_fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._disk.steps.append(("sync", self._name, None))
        self._content.durable = bytes(self._content.seen)

    def is_at(self, path: Path, size: int) -> bool:
        return self._disk._contents.get(path) is self._content and len(self._content.seen) >= size

    def truncate(self, size: int) -> None:
        if self._disk.truncate_fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._disk.steps.append(("truncate", self._name, size))
        del self._content.seen[size:]
        self._content.durable = self._content.durable[:size]

    def close(self) -> None:
        """Does nothing: no file is open."""
