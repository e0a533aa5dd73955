"""The journal's interface to the file system. Tests replace it to record calls, inject errors and simulate crashes."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import IO, Protocol

from millstream.errors import DirectoryLocked, MillstreamError

LOCK_NAME = "lock"


class AppendFile(Protocol):
    def write(self, data: bytes) -> int:
        """Appends data; returns the number of bytes written, which may be fewer than all."""

    def sync(self) -> None:
        """Returns when all written data is on the disk."""

    def is_at(self, path: Path, size: int) -> bool:
        """Whether ``path`` is this file and not another one, with at least ``size`` bytes."""

    def truncate(self, size: int) -> None: ...

    def close(self) -> None: ...


class Files(Protocol):
    def append_to(self, path: Path) -> AppendFile:
        """Opens a file for appending; creates it if it does not exist."""

    def read(self, path: Path) -> IO[bytes]: ...

    def size(self, path: Path) -> int:
        """The size in bytes; 0 if the file does not exist."""

    def replace(self, source: Path, target: Path) -> None:
        """Renames atomically. Durable after ``sync_directory``."""

    def remove(self, path: Path) -> None:
        """Removes a file; no error if it does not exist."""

    def sync_directory(self, path: Path) -> None: ...


def require_progress(written: int) -> int:
    """Raises OSError for a write that wrote nothing and reported no error, so that it is not retried endlessly."""
    if written <= 0:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return written


class DiskFile:
    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, data: bytes) -> int:
        return os.write(self._fd, data)

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def is_at(self, path: Path, size: int) -> bool:
        try:
            at_path, own = path.stat(), os.fstat(self._fd)
        except FileNotFoundError:
            return False
        return os.path.samestat(at_path, own) and own.st_size >= size

    def truncate(self, size: int) -> None:
        os.ftruncate(self._fd, size)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class DiskFiles:
    """The real file system."""

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

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def sync_directory(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


class DirectoryLock:
    """A lock on a data directory, held from ``take`` to ``release`` or until the process ends (the kernel releases it).

    The directory itself is locked, because a lock file can be deleted, and a second process would then lock a new file.
    The lock file is locked too: it contains the process id of the owner, and version 0.1 checks only this file.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._fds: list[int] = []

    def take(self) -> None:
        """Locks the directory; creates it (mode 0700) if missing. DirectoryLocked names the process that owns it."""
        try:
            self._lock_files()
            self._write_pid()
        except BlockingIOError:
            pid = _read_pid(self._fds[1])
            self.release()
            raise DirectoryLocked(
                f"the data directory {self._directory} is open in {f'process {pid}' if pid else 'another process'}. "
                "Stop that process, or share the directory between processes with `millstream serve`.",
                path=str(self._directory),
                pid=pid,
            ) from None
        except OSError as error:
            self.release()
            raise MillstreamError(
                f"the data directory {self._directory} cannot be used: {error.strerror}. "
                "Choose another directory, or give this user write permission."
            ) from error
        except BaseException:  # interrupted: the caller does not own the lock, so it must not stay locked
            self.release()
            raise

    def _lock_files(self) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._fds.append(os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        self._fds.append(os.open(self._directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        for fd in self._fds:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _write_pid(self) -> None:
        try:
            os.ftruncate(self._fds[1], 0)
            os.pwrite(self._fds[1], b"%d\n" % os.getpid(), 0)
        except OSError:
            pass  # only for the error message, which says "another process" without it (the disk may be full)

    def holds(self) -> bool:
        """Whether the path still is the directory that was locked."""
        try:
            return bool(self._fds) and os.path.samestat(self._directory.stat(), os.fstat(self._fds[0]))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        fds, self._fds = self._fds, []
        for fd in reversed(fds):
            os.close(fd)


def _read_pid(fd: int) -> int | None:
    text = os.pread(fd, 32, 0).strip()
    return int(text) if text.isdigit() else None
