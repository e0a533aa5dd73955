"""The storage interface. Contract:

- A name is a relative path with ``/`` between its parts. Parents are created when an object is written.
- An object is visible under its name only when it is whole and durable. A writer that dies leaves the previous content,
  or none.
- ``create`` never replaces an object. Of several concurrent writers exactly one receives True.
- Objects are small enough for memory (a few hundred MiB at most). Parquet files are written and read by Spark itself,
  at ``uri``.
- Errors are ``StorageError``; they name the store and the path.

Every implementation passes ``tests/support/storage_contract.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An entry of a listing. ``name`` is the last part of its path. ``size`` is 0 for a directory."""

    name: str
    size: int
    modified_ms: int
    is_directory: bool


class Storage(ABC):
    """A directory of a pipeline. Thread-safe."""

    location: str
    """The absolute path or URI of this directory, without a slash at its end."""
    is_local: bool
    """Whether ``location`` is a path that only this host is known to see."""

    @abstractmethod
    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """The object's bytes from ``offset``, at most ``length`` of them. Raises ObjectMissing."""

    @abstractmethod
    def write(self, name: str, *parts: Buffer) -> None:
        """Stores the joined parts, and replaces an object of this name."""

    @abstractmethod
    def create(self, name: str, *parts: Buffer) -> bool:
        """Stores the joined parts if no object has this name. False if another writer was first: its object stays."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Removes an object, or a directory with everything in it. Nothing happens if there is none."""

    @abstractmethod
    def list(self, name: str = "") -> list[StoredObject]:
        """The entries of a directory, sorted by name; empty if there is no such directory.

        Temporary files of writers are not listed.
        """

    @abstractmethod
    def stat(self, name: str) -> StoredObject | None:
        """The object or directory; None if there is none."""

    @abstractmethod
    def fetch(self, name: str, target: Path) -> None:
        """Copies an object to a new private file of this host. Raises ObjectMissing."""

    @abstractmethod
    def persist(self, name: str) -> None:
        """Makes durable what another program has written into a directory, as far as the store needs it."""

    @abstractmethod
    def make(self) -> None:
        """Creates this directory. Raises StorageError if that is not possible."""

    @abstractmethod
    def free_bytes(self) -> int | None:
        """Free space of the disk or store; None if it has no known limit."""

    @abstractmethod
    def directory(self, name: str) -> Storage:
        """The storage of a directory inside this one. Creates nothing."""

    def uri(self, name: str = "") -> str:
        """The address of an object or directory for Spark's readers and writers."""
        return f"{self.location}/{name}" if name else self.location

    def exists(self, name: str) -> bool:
        return self.stat(name) is not None

    def size(self, name: str) -> int:
        """Bytes of an object, or of everything in a directory. 0 if there is none."""
        stored = self.stat(name)
        if stored is None:
            return 0
        if not stored.is_directory:
            return stored.size
        return sum(self.size(f"{name}/{entry.name}") if entry.is_directory else entry.size for entry in self.list(name))

    def delete_all(self, names: Iterable[str]) -> None:
        for name in names:
            self.delete(name)
