"""A journal that is being written anew, beside the one in use. It counts only after ``Journal.switch``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from millstream.engine.journal.files import Files, took_some
from millstream.engine.journal.frames import FIRST_CHAIN, HEAD, seal
from millstream.engine.journal.packing import Effect, Packer
from millstream.wire.resp import pack

FRAME_BYTES: Final = 1 << 20


class Replacement:
    def __init__(self, path: Path, files: Files) -> None:
        """An empty one; what an earlier attempt may have left is thrown away."""
        files.remove(path)
        self.path = path
        self.file = files.append_to(path)
        self.size = 0
        self.chain = FIRST_CHAIN
        self._packer = Packer()
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._write(HEAD)

    @classmethod
    def resume(cls, path: Path, files: Files, *, size: int, chain: int, database: int) -> Replacement:
        """Goes on where another process has ended its part, in the database that what follows was written for."""
        resumed = cls.__new__(cls)
        resumed.path, resumed.file, resumed.size, resumed.chain = path, files.append_to(path), size, chain
        resumed._packer, resumed._pending, resumed._pending_bytes = Packer(database), [], 0
        resumed.add_bytes(pack((b"SELECT", b"%d" % database)))
        return resumed

    @property
    def database(self) -> int:
        """What is selected at the end; to be set by whoever adds bytes that change it."""
        return self._packer.database

    @database.setter
    def database(self, number: int) -> None:
        self._packer.database = number

    def add(self, units: Iterable[Sequence[Effect]]) -> None:
        for unit in units:
            self.add_bytes(self._packer.pack((unit,)))

    def add_bytes(self, commands: bytes) -> None:
        """Commands that are packed already."""
        self._pending.append(commands)
        self._pending_bytes += len(commands)
        if self._pending_bytes >= FRAME_BYTES:
            self.flush()

    def flush(self) -> None:
        payload = b"".join(self._pending)
        self._pending.clear()
        self._pending_bytes = 0
        if payload:
            head, chain = seal(payload, self.chain)
            self._write(head + payload)
            self.chain = chain

    def sync(self) -> None:
        self.flush()
        self.file.sync()

    def discard(self) -> None:
        self.file.close()

    def _write(self, data: bytes) -> None:
        taken = 0
        while taken < len(data):
            taken += took_some(self.file.write(data[taken:]))
        self.size += len(data)
