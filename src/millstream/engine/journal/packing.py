"""Units of effects as the bytes of commands: SELECT where the database changes, MULTI around what belongs together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from millstream.wire.resp import pack

Effect = tuple[int, tuple[bytes, ...]]

_MULTI: Final = pack((b"MULTI",))
_EXEC: Final = pack((b"EXEC",))


class Packer:
    """Remembers which database the bytes so far have selected."""

    __slots__ = ("database",)

    def __init__(self, database: int = 0) -> None:
        self.database = database

    def pack(self, units: Iterable[Sequence[Effect]]) -> bytes:
        pieces: list[bytes] = []
        add = pieces.append
        for unit in units:
            if len(unit) == 1:
                ((database, words),) = unit
                if database != self.database:
                    add(self._select(database))
                add(pack(words))
                continue
            add(_MULTI)
            for database, words in unit:
                if database != self.database:
                    add(self._select(database))
                add(pack(words))
            add(_EXEC)
        return b"".join(pieces)

    def _select(self, database: int) -> bytes:
        self.database = database
        return pack((b"SELECT", b"%d" % database))
