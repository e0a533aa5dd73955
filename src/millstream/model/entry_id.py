"""An entry's id: milliseconds and a sequence number, ordered as Redis orders them."""

from __future__ import annotations

from typing import NamedTuple

from millstream.errors import InvalidArgument

_LIMIT = 2**64
_LONGEST = 80
"""Bytes of an id's text, leading zeros allowed for: Python refuses to read numbers of thousands of digits."""


class EntryId(NamedTuple):
    """Compares, sorts and hashes as the pair that it is. ``str()`` gives the form that Redis prints."""

    ms: int
    seq: int = 0

    @classmethod
    def parse(cls, text: str | bytes, *, argument: str = "id") -> EntryId:
        """Reads ``ms-seq`` or ``ms`` (sequence 0). Anything else is an InvalidArgument that names ``argument``."""
        raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        ms_text, dash, seq_text = raw.partition(b"-")
        if len(raw) <= _LONGEST and ms_text.isdigit() and (seq_text.isdigit() if dash else True):
            ms, seq = int(ms_text), int(seq_text or 0)
            if ms < _LIMIT and seq < _LIMIT:
                return cls(ms, seq)
        raise InvalidArgument(argument, text, "an id such as 1526919030474-55")

    def is_possible(self) -> bool:
        """Whether both parts are whole numbers of 64 bits: a pair can be made of anything."""
        return type(self.ms) is type(self.seq) is int and 0 <= self.ms < _LIMIT and 0 <= self.seq < _LIMIT

    def __str__(self) -> str:
        return f"{self.ms}-{self.seq}"

    def __bytes__(self) -> bytes:
        return b"%d-%d" % self

    def next(self) -> EntryId:
        """The smallest id greater than this one."""
        return EntryId(self.ms, self.seq + 1) if self.seq + 1 < _LIMIT else EntryId(self.ms + 1, 0)

    def previous(self) -> EntryId:
        """The greatest id smaller than this one; 0-0 has none."""
        if self.seq:
            return EntryId(self.ms, self.seq - 1)
        if self.ms:
            return EntryId(self.ms - 1, _LIMIT - 1)
        raise InvalidArgument("id", str(self), "an id greater than 0-0")


MIN_ID = EntryId(0, 0)
MAX_ID = EntryId(_LIMIT - 1, _LIMIT - 1)
