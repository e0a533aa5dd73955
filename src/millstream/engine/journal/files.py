"""What the journal asks of a file system, behind a seam: tests record it, break it, and cut the power."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO, Protocol

from millstream.errors import DirectoryLocked, MillstreamError

LOCK_NAME = "lock"


class AppendFile(Protocol):
    def write(self, data: bytes) -> int:
        """Appends; returns how much of it was taken, which may be less than all."""

    def sync(self) -> None:
        """Returns when everything that was written is on the disk."""

    def truncate(self, size: int) -> None: ...

    def close(self) -> None: ...


class Files(Protocol):
    def append_to(self, path: Path) -> AppendFile:
        """Opens for appending, and creates if need be."""

    def read(self, path: Path) -> IO[bytes]: ...

    def size(self, path: Path) -> int:
        """0 where there is no such file."""

    def replace(self, source: Path, target: Path) -> None:
        """Atomic, and on the disk when it returns."""

    def remove(self, path: Path) -> None:
        """No error if it is not there."""

    def sync_directory(self, path: Path) -> None: ...


class DiskFile:
    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, data: bytes) -> int:
        return os.write(self._fd, data)

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def truncate(self, size: int) -> None:
        os.ftruncate(self._fd, size)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class DiskFiles:
    """The real thing."""

    def append_to(self, path: Path) -> AppendFile:
        return DiskFile(path)

    def read(self, path: Path) -> IO[bytes]:
        return path.open("rb", buffering=1 << 20)

    def size(self, path: Path) -> int:
        try:
            return path.stat().st_size
        except FileNotFoundError:
            return 0

    def replace(self, source: Path, target: Path) -> None:
        source.replace(target)
        self.sync_directory(target.parent)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def sync_directory(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


class DirectoryLock:
    """Held from ``take`` to ``release``, or until the process ends in whatever way: the kernel lets go of it then."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._fd = -1

    def take(self) -> None:
        """Creates the directory (0700) if need be. DirectoryLocked names the process that holds it."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(self._directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise MillstreamError(
                f"the data directory {self._directory} cannot be used: {error.strerror}. "
                "Choose another directory, or give this user the right to write there."
            ) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = _read_pid(fd)
            os.close(fd)
            raise DirectoryLocked(
                f"the data directory {self._directory} is open in {f'process {pid}' if pid else 'another process'}. "
                "Stop it, or let it serve: `millstream serve` opens a directory to many processes.",
                path=str(self._directory),
                pid=pid,
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"%d\n" % os.getpid(), 0)
        self._fd = fd

    def release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _read_pid(fd: int) -> int | None:
    text = os.pread(fd, 32, 0).strip()
    return int(text) if text.isdigit() else None
