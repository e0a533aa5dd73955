"""How far a stream may be cut."""

from __future__ import annotations

from typing import NamedTuple

from millstream.errors import InvalidArgument
from millstream.model.entry_id import EntryId


class TrimPolicy(NamedTuple):
    """MAXLEN or MINID, exactly one of them. ``approximate`` lets the server drop whole nodes only, which is cheaper."""

    max_len: int | None = None
    min_id: EntryId | None = None
    approximate: bool = False
    limit: int | None = None

    def words(self) -> tuple[bytes, ...]:
        """The policy as the words of XADD and XTRIM."""
        if (self.max_len is None) == (self.min_id is None):
            raise InvalidArgument("trim", self, "exactly one of max_len and min_id")
        if self.max_len is not None and self.max_len < 0:
            raise InvalidArgument("trim.max_len", self.max_len, "a number that is not negative")
        if self.limit is not None and (self.limit < 0 or not self.approximate):
            raise InvalidArgument("trim.limit", self.limit, "a number that is not negative, with approximate=True")
        sign = b"~" if self.approximate else b"="
        if self.min_id is not None:
            words: tuple[bytes, ...] = (b"MINID", sign, bytes(self.min_id))
        else:
            words = (b"MAXLEN", sign, b"%d" % (self.max_len or 0))
        return (*words, b"LIMIT", b"%d" % self.limit) if self.limit is not None else words
