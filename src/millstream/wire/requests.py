"""What clients send, as commands. Strict: arrays of bulk strings, or one line of words; anything else is Redis's error.

Well-formed requests go through hiredis, whose reader is meant for replies and would let more pass: so each chunk is
packed again and compared. What differs or is not complete goes the slow way, word by word, where the limits are.

Bounds come before work. hiredis makes room for as many words as a request announces, so it never sees a large number.
Each byte is tried once the fast way and read at most once the slow way, whatever a client sends: see ``_trial_bytes``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

import hiredis

pack_command: Any = hiredis.pack_command  # its stub allows one word only

LINE_LIMIT: Final = 64 * 1024
"""The longest line: an inline command, or a number after ``*`` or ``$``."""

BROWSERS: Final = (b"POST", b"HOST:")
"""What a web page can make a browser send to a port that is not its own. Redis hangs up on it, and so do we."""

_MANY_WORDS: Final = re.compile(rb"\*\d{5,}\r\n")
_MANY_MEMBERS: Final = re.compile(rb"~\d{5,}\r\n")
_MANY_PUSHED: Final = re.compile(rb">\d{5,}\r\n")
_MANY_ATTRIBUTES: Final = re.compile(rb"\|\d{5,}\r\n")
"""What may be the head of ten thousand items or more: hiredis makes room for them at once. Wherever it stands, for
hiredis does not look at the two bytes behind a word. A pattern for each mark: to look for a fixed byte is fast."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    bulk_bytes: int = 512 << 20
    words: int = 1 << 20
    request_bytes: int = 1 << 30
    """All words of one request together."""


UNAUTHENTICATED: Final = RequestLimits(bulk_bytes=16384, words=10, request_bytes=LINE_LIMIT)


class ProtocolError(Exception):
    """The client does not speak RESP: it is told so with ``text``, and its connection is closed."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.text = f"ERR Protocol error: {what}"


class RequestParser:
    """One connection's input. ``feed`` returns the requests that became complete; after an error it takes no more.

    ``limits`` may be changed between two calls. Before authentication one request is returned at a time, because it may
    be the one that lifts them; ``feed(b"")`` goes on. ``fault`` is set at the first byte that does not fit; requests
    that came before it are returned all the same. ``hostile`` is set when a browser's line came, which is the last
    request then: its body is not looked at.
    """

    __slots__ = (
        "_buffer",
        "_bulk",
        "_reader",
        "_request_bytes",
        "_searched",
        "_trial_bytes",
        "_words",
        "_words_left",
        "fault",
        "hostile",
        "limits",
    )

    def __init__(self, limits: RequestLimits) -> None:
        self.limits = limits
        self.fault: ProtocolError | None = None
        self.hostile = False
        self._reader = hiredis.Reader()
        """Empty between two calls: it never keeps the beginning of a request."""
        self._buffer = bytearray()
        self._words: list[bytes] = []
        self._words_left = 0
        self._bulk = -1
        """The length of the word that is being read; -1 while its length is not known."""
        self._request_bytes = 0
        self._searched = 0
        """So many bytes of the buffer were searched for the end of its first line, in vain."""
        self._trial_bytes = 0
        """So many bytes may still be tried the fast way: those that came with the last ``feed``, and each of them once.
        Otherwise one odd request after many good ones, or among them, would have the good ones parsed over again."""

    def feed(self, data: bytes) -> list[list[bytes]]:
        if self.fault is not None or self.hostile:
            return []
        if self._buffer or self._words_left:
            self._buffer += data
            self._trial_bytes = max(self._trial_bytes, len(data))
            requests: list[list[bytes]] = []
        else:
            requests, taken = self._whole_requests(data)
            if taken == len(data):
                return requests
            self._buffer += data[taken:] if taken else data
            self._trial_bytes = 0
        try:
            self._slowly(requests)
        except ProtocolError as fault:
            self.fault = fault
            self._buffer.clear()
        return requests

    @property
    def more(self) -> bool:
        """Whether bytes are left that ``feed`` may make something of."""
        return bool(self._buffer)

    def _whole_requests(self, data: bytes) -> tuple[list[list[bytes]], int]:
        """The requests at the beginning of ``data`` that are whole and strictly well-formed, and how many bytes they
        take. None of them is taken where something is odd, or may exceed a limit: then the slow way decides."""
        limits = self.limits
        if limits is UNAUTHENTICATED or len(data) > limits.bulk_bytes or len(data) > limits.request_bytes:
            return [], 0
        if data[:1] != b"*" or _announces_many(data):
            return [], 0
        requests: list[list[bytes]] = []
        gets = self._reader.gets
        try:
            self._reader.feed(data)
            while (request := gets()) is not False:
                requests.append(request)
        except (hiredis.ProtocolError, ValueError, MemoryError, RecursionError):
            pass  # those before it may be fine
        try:
            packed = b"".join([pack_command(tuple(request)) for request in requests])
        except TypeError:
            packed = b""
        if len(packed) == len(data) and packed == data:
            # An array of nothing is no request.
            return (requests if all(requests) else [one for one in requests if one]), len(data)
        self._reader = hiredis.Reader()  # one that holds the beginning of something cannot be emptied, only replaced
        if not packed or not data.startswith(packed):
            return [], 0
        return [one for one in requests if one], len(packed)

    def _slowly(self, requests: list[list[bytes]]) -> None:
        while self._buffer or self._words_left:
            if not self._words_left:
                if self._buffer[0] != 0x2A:  # an asterisk
                    if not self._inline(requests) or (requests and self.limits is UNAUTHENTICATED):
                        return
                    continue
                if not self._count():
                    return
                continue
            if not self._next_words():
                return
            requests.append(self._words)
            self._words, self._request_bytes = [], 0
            if self.limits is UNAUTHENTICATED:
                return
            # What follows a request that came in pieces is most likely whole again.
            if 512 < len(self._buffer) <= self._trial_bytes:
                self._trial_bytes = 0
                more, taken = self._whole_requests(bytes(self._buffer))
                requests += more
                del self._buffer[:taken]

    def _line(self, too_long: str) -> bytes | None:
        end = self._buffer.find(b"\r\n", self._searched, LINE_LIMIT + 2)
        if end < 0:
            if len(self._buffer) > LINE_LIMIT:
                raise ProtocolError(too_long)
            self._searched = len(self._buffer) - 1  # its last byte may be the first of the two
            return None
        self._searched = 0
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 2]
        return line

    def _count(self) -> bool:
        line = self._line("too big mbulk count string")
        if line is None:
            return False
        count = _number(line[1:])
        if count is None or count > (1 << 31) - 1:
            raise ProtocolError("invalid multibulk length")
        if count > self.limits.words:
            raise ProtocolError("unauthenticated multibulk length" if self._unknown else "invalid multibulk length")
        self._words_left = max(count, 0)
        return True

    def _next_words(self) -> bool:
        while self._words_left:
            if self._bulk < 0 and not self._bulk_length():
                return False
            end = self._bulk + 2
            if len(self._buffer) < end:
                return False
            if self._buffer[end - 2 : end] != b"\r\n":
                raise ProtocolError("expected CRLF after a bulk string")
            self._words.append(bytes(self._buffer[: end - 2]))
            del self._buffer[:end]
            self._bulk = -1
            self._words_left -= 1
        return True

    def _bulk_length(self) -> bool:
        if not self._buffer:
            return False
        if self._buffer[0] != 0x24:  # a dollar sign
            raise ProtocolError(f"expected '$', got '{chr(self._buffer[0])}'")
        line = self._line("too big bulk count string")
        if line is None:
            return False
        length = _number(line[1:])
        if length is None or length < 0:
            raise ProtocolError("invalid bulk length")
        if length > self.limits.bulk_bytes:
            raise ProtocolError("unauthenticated bulk length" if self._unknown else "invalid bulk length")
        self._request_bytes += length
        if self._request_bytes > self.limits.request_bytes:
            raise ProtocolError(f"request over the limit of {self.limits.request_bytes} bytes")
        self._bulk = length
        return True

    def _inline(self, requests: list[list[bytes]]) -> bool:
        end = self._buffer.find(b"\n", self._searched, LINE_LIMIT + 1)
        if end < 0:
            if len(self._buffer) > LINE_LIMIT:
                raise ProtocolError("too big inline request")
            self._searched = len(self._buffer)
            return False
        self._searched = 0
        line = bytes(self._buffer[:end]).removesuffix(b"\r")
        del self._buffer[: end + 1]
        words = split_words(line)
        if words is None:
            raise ProtocolError("unbalanced quotes in request")
        if words:
            requests.append(words)
            if words[0].upper() in BROWSERS:
                self.hostile = True
                self._buffer.clear()
        return True

    @property
    def _unknown(self) -> bool:
        return self.limits is UNAUTHENTICATED


def _announces_many(data: bytes) -> bool:
    return (
        _MANY_WORDS.search(data) is not None
        or (b"~" in data and _MANY_MEMBERS.search(data) is not None)
        or (b">" in data and _MANY_PUSHED.search(data) is not None)
        or (b"|" in data and _MANY_ATTRIBUTES.search(data) is not None)
    )


def _number(text: bytes) -> int | None:
    """As Redis reads one: a minus at most, digits, no leading zero, 64 bits."""
    digits = text.removeprefix(b"-")
    if not digits.isdigit() or len(digits) > 19 or (digits[0] == 0x30 and text != b"0"):
        return None
    return int(text)


# --- a line that a person typed: quotes and escapes in the way of redis-cli -------------------------------------------

_ESCAPES: Final = {0x6E: 0x0A, 0x72: 0x0D, 0x74: 0x09, 0x62: 0x08, 0x61: 0x07}
_SPACES: Final = b" \t\n\r\v\f\0"
_QUOTE, _APOSTROPHE, _BACKSLASH, _X = 0x22, 0x27, 0x5C, 0x78


def split_words(line: bytes) -> list[bytes] | None:
    """None where a quote is not closed, or is not followed by a space."""
    words: list[bytes] = []
    at, end = 0, len(line)
    while True:
        while at < end and line[at] in _SPACES:
            at += 1
        if at == end:
            return words
        word = bytearray()
        while at < end and line[at] not in _SPACES:
            if line[at] in (_QUOTE, _APOSTROPHE):
                after = _quoted(line, at, word)
                if after is None or (after < end and line[after] not in _SPACES):
                    return None
                at = after
            else:
                word.append(line[at])
                at += 1
        words.append(bytes(word))


def _quoted(line: bytes, at: int, word: bytearray) -> int | None:
    """Adds what stands between the quotes to ``word``; returns the place behind them."""
    quote, end = line[at], len(line)
    at += 1
    while at < end:
        byte = line[at]
        if byte == quote:
            return at + 1
        if byte == _BACKSLASH and at + 1 < end and (quote == _QUOTE or line[at + 1] == _APOSTROPHE):
            byte, at = _escaped(line, at) if quote == _QUOTE else (_APOSTROPHE, at + 1)
        word.append(byte)
        at += 1
    return None


def _escaped(line: bytes, at: int) -> tuple[int, int]:
    """The byte that an escape stands for, and the place of the escape's last byte."""
    letter = line[at + 1]
    if letter == _X:
        digits = line[at + 2 : at + 4]
        if len(digits) == 2 and digits.isalnum():
            try:
                return int(digits, 16), at + 3
            except ValueError:
                pass  # not hexadecimal: the letter stands for itself
    return _ESCAPES.get(letter, letter), at + 1
