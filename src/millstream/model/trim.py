"""How far a stream may be cut."""

from __future__ import annotations

from typing import NamedTuple

from millstream.errors import InvalidArgument
from millstream.model.entry_id import EntryId

_GREATEST = 2**63 - 1


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
        if self.max_len is not None and not _is_count(self.max_len):
            raise InvalidArgument("trim.max_len", self.max_len, f"a whole number from 0 to {_GREATEST}")
        if self.limit is not None and (not _is_count(self.limit) or not self.approximate):
            allowed = f"a whole number from 0 to {_GREATEST}, with approximate=True"
            raise InvalidArgument("trim.limit", self.limit, allowed)
        if self.min_id is not None and not (isinstance(self.min_id, EntryId) and self.min_id.is_possible()):
            raise InvalidArgument("trim.min_id", self.min_id, "an EntryId such as EntryId(1526919030474, 55)")
        sign = b"~" if self.approximate else b"="
        if self.min_id is not None:
            words: tuple[bytes, ...] = (b"MINID", sign, bytes(self.min_id))
        else:
            words = (b"MAXLEN", sign, b"%d" % (self.max_len or 0))
        return (*words, b"LIMIT", b"%d" % self.limit) if self.limit is not None else words


def _is_count(number: object) -> bool:
    return type(number) is int and 0 <= number <= _GREATEST
