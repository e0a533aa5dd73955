"""What the journal asks of a file system, behind a seam: tests record it, break it, and cut the power."""

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
        """Appends; returns how much of it was taken, which may be less than all."""

    def sync(self) -> None:
        """Returns when everything that was written is on the disk."""

    def is_at(self, path: Path, size: int) -> bool:
        """Whether this file, and no other, is to be found under ``path``, with at least so many bytes."""

    def truncate(self, size: int) -> None: ...

    def close(self) -> None: ...


class Files(Protocol):
    def append_to(self, path: Path) -> AppendFile:
        """Opens for appending, and creates if need be."""

    def read(self, path: Path) -> IO[bytes]: ...

    def size(self, path: Path) -> int:
        """0 where there is no such file."""

    def replace(self, source: Path, target: Path) -> None:
        """Atomic. On the disk after ``sync_directory``."""

    def remove(self, path: Path) -> None:
        """No error if it is not there."""

    def sync_directory(self, path: Path) -> None: ...


def took_some(taken: int) -> int:
    """A file that takes nothing and says nothing would be asked for ever."""
    if taken <= 0:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return taken


class DiskFile:
    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, data: bytes) -> int:
        return os.write(self._fd, data)

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def is_at(self, path: Path, size: int) -> bool:
        try:
            found, own = path.stat(), os.fstat(self._fd)
        except FileNotFoundError:
            return False
        return os.path.samestat(found, own) and own.st_size >= size

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

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def sync_directory(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


class DirectoryLock:
    """Held from ``take`` to ``release``, or until the process ends in whatever way: the kernel lets go of it then.

    The directory itself is locked, since a file in it can be deleted, and a second process would lock a new one. The
    file is locked too: it names the holder, and it is all that version 0.1 looks at.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._fds: list[int] = []

    def take(self) -> None:
        """Creates the directory (0700) if need be. DirectoryLocked names the process that holds it."""
        try:
            self._take()
            self._sign()
        except BlockingIOError:
            pid = _read_pid(self._fds[1])
            self.release()
            raise DirectoryLocked(
                f"the data directory {self._directory} is open in {f'process {pid}' if pid else 'another process'}. "
                "Stop it, or let it serve: `millstream serve` opens a directory to many processes.",
                path=str(self._directory),
                pid=pid,
            ) from None
        except OSError as error:
            self.release()
            raise MillstreamError(
                f"the data directory {self._directory} cannot be used: {error.strerror}. "
                "Choose another directory, or give this user the right to write there."
            ) from error
        except BaseException:  # interrupted: nobody has it, so nobody may be kept out
            self.release()
            raise

    def _take(self) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._fds.append(os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        self._fds.append(os.open(self._directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        for fd in self._fds:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _sign(self) -> None:
        try:
            os.ftruncate(self._fds[1], 0)
            os.pwrite(self._fds[1], b"%d\n" % os.getpid(), 0)
        except OSError:
            pass  # the number is for people; on a full disk they are told of "another process"

    def holds(self) -> bool:
        """Whether what is found under the directory's name is still the directory that was locked."""
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
