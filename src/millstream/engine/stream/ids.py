"""Parsing and formatting of entry ids. Inside the engine an id is one int, ``ms << 64 | seq``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from millstream.wire import ErrorReply

SEQ_BITS: Final = 64
SEQ_MAX: Final = (1 << 64) - 1
ID_MAX: Final = (1 << 128) - 1

INVALID_ID: Final = "ERR Invalid stream ID specified as stream command argument"
INVALID_START: Final = "ERR invalid start ID for the interval"
INVALID_END: Final = "ERR invalid end ID for the interval"

MAX_ID_LENGTH: Final = 127
_SAFE_DIGITS: Final = 19
"""Numbers with this many digits always fit into 64 bits."""
_STRTOULL: Final = re.compile(rb"[ \t\n\v\f\r]*([+-]?)([0-9]+)")
_STRICT: Final = re.compile(rb"0|-?[1-9][0-9]*")


def format_id(entry_id: int) -> bytes:
    return b"%d-%d" % (entry_id >> SEQ_BITS, entry_id & SEQ_MAX)


def parse_id(raw: bytes, missing_seq: int = 0) -> int:
    """Parses ``ms-seq`` or ``ms`` strictly, as Redis does: ``-`` and ``+`` are invalid."""
    entry_id = plain_id(raw)
    if entry_id is None:
        entry_id = _read(raw, missing_seq)
        if entry_id is None:
            raise ErrorReply(INVALID_ID)
    return entry_id


def plain_id(raw: bytes) -> int | None:
    """Fast path for ids as servers write them; None for other arguments and for unusual spellings of ids."""
    ms, _, seq = raw.partition(b"-")
    if seq.isdigit() and ms.isdigit() and len(seq) <= _SAFE_DIGITS and len(ms) <= _SAFE_DIGITS:
        return int(ms) << SEQ_BITS | int(seq)
    return None


def parse_ids(args: Sequence[bytes]) -> list[int]:
    """``parse_id`` for many ids; fast if many have the same milliseconds."""
    ids: list[int] = []
    times: dict[bytes, int] = {}
    for raw in args:
        ms_digits, _, seq_digits = raw.partition(b"-")
        if not seq_digits.isdigit() or len(seq_digits) > _SAFE_DIGITS:
            ids.append(parse_id(raw))
            continue
        time = times.get(ms_digits)
        if time is None:
            if not ms_digits.isdigit() or len(ms_digits) > _SAFE_DIGITS:
                ids.append(parse_id(raw))
                continue
            time = times[ms_digits] = int(ms_digits) << SEQ_BITS
        ids.append(time | int(seq_digits))
    return ids


def read_id(raw: bytes) -> int | None:
    """``parse_id`` that returns None for an argument that is not an id (XCLAIM: ids are followed by options)."""
    return _read(raw, 0)


def parse_loose_id(raw: bytes, missing_seq: int) -> int:
    """Like ``parse_id``, but accepts ``-`` (the smallest id) and ``+`` (the greatest id)."""
    text = _as_c_string(raw)
    if text == b"-":
        return 0
    if text == b"+":
        return ID_MAX
    return parse_id(raw, missing_seq)


def parse_new_id(raw: bytes) -> tuple[int, bool]:
    """XADD's id, and whether it is complete: for ``ms-*`` the stream chooses the sequence number."""
    text = _as_c_string(raw)
    if len(raw) <= MAX_ID_LENGTH and text.endswith(b"-*") and text.count(b"-") == 1:
        ms = _string2ull(text[:-2])
        if ms is not None:
            return ms << SEQ_BITS, False
    return parse_id(raw), True


def parse_start(raw: bytes) -> int:
    """The first id of an interval; ``(id`` excludes the id itself."""
    if len(raw) > 1 and raw[:1] == b"(":
        entry_id = parse_id(raw[1:])
        if entry_id == ID_MAX:
            raise ErrorReply(INVALID_START)
        return entry_id + 1
    return parse_loose_id(raw, 0)


def parse_end(raw: bytes) -> int:
    """The last id of an interval; a missing sequence number means the whole millisecond."""
    if len(raw) > 1 and raw[:1] == b"(":
        entry_id = parse_id(raw[1:], SEQ_MAX)
        if entry_id == 0:
            raise ErrorReply(INVALID_END)
        return entry_id - 1
    return parse_loose_id(raw, SEQ_MAX)


def _read(raw: bytes, missing_seq: int) -> int | None:
    if len(raw) > MAX_ID_LENGTH:
        return None
    left, dash, right = _as_c_string(raw).partition(b"-")
    ms = _string2ull(left)
    seq = _string2ull(right) if dash else missing_seq
    if ms is None or seq is None:
        return None
    return ms << SEQ_BITS | seq


def _as_c_string(raw: bytes) -> bytes:
    return raw.split(b"\0", 1)[0]


def _string2ull(text: bytes) -> int | None:
    """Parses as leniently as Redis, which falls back to ``strtoull``.

    Leading blanks, a sign and leading zeros are accepted. A negative number in plain form is rejected, but after a
    blank it wraps around.
    """
    if _STRICT.fullmatch(text):
        number = int(text)
        if -(1 << 63) <= number < 0:
            return None
    match = _STRTOULL.fullmatch(text)
    if match is None:
        return None
    sign, digits = match.groups()
    number = int(digits)
    if number > SEQ_MAX:
        return None
    return -number & SEQ_MAX if sign == b"-" else number
