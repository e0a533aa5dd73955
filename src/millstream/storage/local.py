"""Storage in a directory of this host, or of a mount that hosts share.

``write``: a temporary file, fsync, rename, fsync of the directory. ``create``: the same with link(2) in place of
rename, which fails if the name exists. Both are atomic on every POSIX file system.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex

from millstream.storage.errors import ObjectMissing, StorageDenied, StorageError, StorageFull
from millstream.storage.storage import Buffer, Storage, StoredObject

_TEMPORARY = ".writing-"
_FULL = {errno.ENOSPC, errno.EDQUOT}
_COPY_BYTES = 1 << 20
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}


class LocalStorage(Storage):
    is_local = True

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(directory))
        self.location = str(self.path)

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        path = self.path / name
        with _errors(path), path.open("rb") as file:
            file.seek(offset)
            return file.read(-1 if length is None else length)

    def write(self, name: str, *parts: Buffer) -> None:
        path = self.path / name
        with _errors(path):
            temporary = _written(path, parts)
            try:
                temporary.replace(path)
            except BaseException:  # also after Ctrl-C
                temporary.unlink(missing_ok=True)
                raise
            _sync(path.parent)

    def create(self, name: str, *parts: Buffer) -> bool:
        path = self.path / name
        with _errors(path):
            if path.exists():
                _sync(path.parent)  # its creator may have died before this
                return False
            temporary = _written(path, parts)
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
            finally:
                temporary.unlink(missing_ok=True)
                _sync(path.parent)
            return True

    def delete(self, name: str) -> None:
        path = self.path / name
        with _errors(path), suppress(FileNotFoundError):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def list(self, name: str = "") -> list[StoredObject]:
        path = self.path / name
        entries = []
        with _errors(path), suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as listing:
            for entry in listing:
                if not entry.name.startswith(_TEMPORARY):
                    with suppress(FileNotFoundError):  # deleted during the listing
                        entries.append(_stored(entry.name, entry.stat(), entry.is_dir()))
        return sorted(entries, key=lambda entry: entry.name)

    def stat(self, name: str) -> StoredObject | None:
        path = self.path / name
        with _errors(path):
            try:
                return _stored(path.name, path.stat(), path.is_dir())
            except (FileNotFoundError, NotADirectoryError):
                return None

    def fetch(self, name: str, target: Path) -> None:
        path = self.path / name
        with _errors(path), path.open("rb") as source, os.fdopen(_new_file(target), "wb") as copy:
            shutil.copyfileobj(source, copy, _COPY_BYTES)

    def persist(self, name: str) -> None:
        path = self.path / name
        with _errors(path):
            for directory, _, files in os.walk(path):
                for file in files:
                    _sync(Path(directory, file))
                _sync(Path(directory))

    def make(self) -> None:
        with _errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)

    def free_bytes(self) -> int | None:
        with _errors(self.path):
            return shutil.disk_usage(self.path).free

    def directory(self, name: str) -> Storage:
        return LocalStorage(self.path / name)


def _stored(name: str, status: os.stat_result, is_directory: bool) -> StoredObject:
    return StoredObject(name, 0 if is_directory else status.st_size, int(status.st_mtime * 1000), is_directory)


def _written(path: Path, parts: tuple[Buffer, ...]) -> Path:
    """A temporary file next to ``path``, synced."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f"{_TEMPORARY}{path.name}.{token_hex(6)}")
    try:
        with os.fdopen(_new_file(temporary), "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:  # also after Ctrl-C
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def _new_file(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise ObjectMissing(str(path)) from error
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno in _FULL:
            raise StorageFull(str(path), f"{why}. Free some space") from error
        if error.errno in _DENIED:
            raise StorageDenied(str(path), f"{why}. Give this user access, or choose another path") from error
        raise StorageError(str(path), f"{why}. Choose another path") from error
