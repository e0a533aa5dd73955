"""Parses what clients send into commands. Strict: arrays of bulk strings, or one inline command; else Redis's protocol
error.

Well-formed requests are parsed by hiredis. Its reader is meant for replies and accepts more than Redis does, so each
chunk is packed again and compared. A chunk that differs or is incomplete is parsed by the strict parser in this file,
which checks the limits argument by argument.

Limits are checked before memory is allocated: hiredis allocates space for as many arguments as a request announces, so
it never receives a large announcement. Each byte is tried at most once with hiredis and read at most once by the strict
parser, whatever a client sends: see ``_trial_bytes``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

import hiredis

pack_command: Any = hiredis.pack_command  # its type stub allows only one argument

LINE_LIMIT: Final = 64 * 1024
"""The maximum length of a line: an inline command, or a number after ``*`` or ``$``."""

BROWSERS: Final = (b"POST", b"HOST:")
"""The first line of an HTTP request, which a web page can make a browser send to another port. Redis closes the
connection, and so does this parser.
"""

_MANY_ARGS: Final = re.compile(rb"\*\d{5,}\r\n")
_MANY_MEMBERS: Final = re.compile(rb"~\d{5,}\r\n")
_MANY_PUSHED: Final = re.compile(rb">\d{5,}\r\n")
_MANY_ATTRIBUTES: Final = re.compile(rb"\|\d{5,}\r\n")
"""Headers that may announce 10,000 items or more, for which hiredis would allocate memory at once. They are searched
anywhere in the data, because hiredis does not check the two bytes after an argument. There is a pattern for each type,
because a search that starts with a fixed byte is fast.
"""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of one request."""

    bulk_bytes: int = 512 << 20
    args: int = 1 << 20
    request_bytes: int = 1 << 30
    """All arguments of one request together."""


UNAUTHENTICATED: Final = RequestLimits(bulk_bytes=16384, args=10, request_bytes=LINE_LIMIT)


class ProtocolError(Exception):
    """The client does not send valid RESP. ``text`` is the error reply; then the connection is closed."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.text = f"ERR Protocol error: {reason}"


class RequestParser:
    """The input of one connection. ``feed`` returns the requests that are complete; after an error it accepts no more.

    ``limits`` may be changed between two calls. Before authentication ``feed`` returns one request at a time, because
    that request may raise the limits; ``feed(b"")`` continues. ``fault`` is set at the first invalid byte; complete
    requests before it are still returned. ``hostile`` is set after a line that a browser sends; it is the last request,
    and its body is ignored.
    """

    __slots__ = (
        "_args",
        "_args_left",
        "_buffer",
        "_bulk",
        "_reader",
        "_request_bytes",
        "_searched",
        "_trial_bytes",
        "fault",
        "hostile",
        "limits",
    )

    def __init__(self, limits: RequestLimits) -> None:
        self.limits = limits
        self.fault: ProtocolError | None = None
        self.hostile = False
        self._reader = hiredis.Reader()
        """Empty between two calls: it never keeps an incomplete request."""
        self._buffer = bytearray()
        self._args: list[bytes] = []
        self._args_left = 0
        self._bulk = -1
        """The length of the argument that is being read; -1 while its length is unknown."""
        self._request_bytes = 0
        self._searched = 0
        """The number of bytes at the start of the buffer that contain no end of a line."""
        self._trial_bytes = 0
        """The number of buffered bytes that may still be tried with hiredis: those of the last ``feed``, each of them
        once. Without this bound, one unusual request after many good ones would make the good ones be parsed again each
        time.
        """

    def feed(self, data: bytes) -> list[list[bytes]]:
        """Adds received bytes and returns the requests that are now complete."""
        if self.fault is not None or self.hostile:
            return []
        if self._buffer or self._args_left:
            self._buffer += data
            self._trial_bytes = max(self._trial_bytes, len(data))
            requests: list[list[bytes]] = []
        else:
            requests, consumed = self._parse_with_hiredis(data)
            if consumed == len(data):
                return requests
            self._buffer += data[consumed:] if consumed else data
            self._trial_bytes = 0
        try:
            self._parse_strictly(requests)
        except ProtocolError as fault:
            self.fault = fault
            self._buffer.clear()
        return requests

    @property
    def more(self) -> bool:
        """Whether buffered bytes are left that the next ``feed`` may parse."""
        return bool(self._buffer)

    def _parse_with_hiredis(self, data: bytes) -> tuple[list[list[bytes]], int]:
        """The complete, strictly well-formed requests at the start of ``data``, and the number of bytes that they use.

        Returns none if the data is unusual or may exceed a limit; then the strict parser decides.
        """
        limits = self.limits
        if limits is UNAUTHENTICATED or len(data) > limits.bulk_bytes or len(data) > limits.request_bytes:
            return [], 0
        if data[:1] != b"*" or _may_announce_many(data):
            return [], 0
        requests: list[list[bytes]] = []
        gets = self._reader.gets
        try:
            self._reader.feed(data)
            while (request := gets()) is not False:
                requests.append(request)
        except (hiredis.ProtocolError, ValueError, MemoryError, RecursionError):
            pass  # the requests before the invalid one may be valid
        try:
            packed = b"".join([pack_command(tuple(request)) for request in requests])
        except TypeError:
            packed = b""
        if len(packed) == len(data) and packed == data:
            # An empty array is not a request.
            return (requests if all(requests) else [request for request in requests if request]), len(data)
        self._reader = hiredis.Reader()  # a reader with an incomplete request cannot be cleared, only replaced
        if not packed or not data.startswith(packed):
            return [], 0
        return [request for request in requests if request], len(packed)

    def _parse_strictly(self, requests: list[list[bytes]]) -> None:
        while self._buffer or self._args_left:
            if not self._args_left:
                if self._buffer[0] != 0x2A:  # an asterisk
                    if not self._read_inline(requests) or (requests and self.limits is UNAUTHENTICATED):
                        return
                    continue
                if not self._read_array_header():
                    return
                continue
            if not self._read_args():
                return
            requests.append(self._args)
            self._args, self._request_bytes = [], 0
            if self.limits is UNAUTHENTICATED:
                return
            # After a request that arrived in pieces, the data is usually well-formed again.
            if 512 < len(self._buffer) <= self._trial_bytes:
                self._trial_bytes = 0
                parsed, consumed = self._parse_with_hiredis(bytes(self._buffer))
                requests += parsed
                del self._buffer[:consumed]

    def _read_line(self, too_long: str) -> bytes | None:
        end = self._buffer.find(b"\r\n", self._searched, LINE_LIMIT + 2)
        if end < 0:
            if len(self._buffer) > LINE_LIMIT:
                raise ProtocolError(too_long)
            self._searched = len(self._buffer) - 1  # the last byte may be the CR of CRLF
            return None
        self._searched = 0
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 2]
        return line

    def _read_array_header(self) -> bool:
        line = self._read_line("too big mbulk count string")
        if line is None:
            return False
        count = _number(line[1:])
        if count is None or count > (1 << 31) - 1:
            raise ProtocolError("invalid multibulk length")
        if count > self.limits.args:
            raise ProtocolError(
                "unauthenticated multibulk length" if self._is_unauthenticated else "invalid multibulk length"
            )
        self._args_left = max(count, 0)
        return True

    def _read_args(self) -> bool:
        while self._args_left:
            if self._bulk < 0 and not self._read_bulk_header():
                return False
            end = self._bulk + 2
            if len(self._buffer) < end:
                return False
            if self._buffer[end - 2 : end] != b"\r\n":
                raise ProtocolError("expected CRLF after a bulk string")
            self._args.append(bytes(self._buffer[: end - 2]))
            del self._buffer[:end]
            self._bulk = -1
            self._args_left -= 1
        return True

    def _read_bulk_header(self) -> bool:
        if not self._buffer:
            return False
        if self._buffer[0] != 0x24:  # a dollar sign
            raise ProtocolError(f"expected '$', got '{chr(self._buffer[0])}'")
        line = self._read_line("too big bulk count string")
        if line is None:
            return False
        length = _number(line[1:])
        if length is None or length < 0:
            raise ProtocolError("invalid bulk length")
        if length > self.limits.bulk_bytes:
            raise ProtocolError("unauthenticated bulk length" if self._is_unauthenticated else "invalid bulk length")
        self._request_bytes += length
        if self._request_bytes > self.limits.request_bytes:
            raise ProtocolError(f"request over the limit of {self.limits.request_bytes} bytes")
        self._bulk = length
        return True

    def _read_inline(self, requests: list[list[bytes]]) -> bool:
        end = self._buffer.find(b"\n", self._searched, LINE_LIMIT + 1)
        if end < 0:
            if len(self._buffer) > LINE_LIMIT:
                raise ProtocolError("too big inline request")
            self._searched = len(self._buffer)
            return False
        self._searched = 0
        line = bytes(self._buffer[:end]).removesuffix(b"\r")
        del self._buffer[: end + 1]
        args = split_inline_args(line)
        if args is None:
            raise ProtocolError("unbalanced quotes in request")
        if args:
            requests.append(args)
            if args[0].upper() in BROWSERS:
                self.hostile = True
                self._buffer.clear()
        return True

    @property
    def _is_unauthenticated(self) -> bool:
        return self.limits is UNAUTHENTICATED


def _may_announce_many(data: bytes) -> bool:
    return (
        _MANY_ARGS.search(data) is not None
        or (b"~" in data and _MANY_MEMBERS.search(data) is not None)
        or (b">" in data and _MANY_PUSHED.search(data) is not None)
        or (b"|" in data and _MANY_ATTRIBUTES.search(data) is not None)
    )


def _number(text: bytes) -> int | None:
    """Parses an integer as Redis does: an optional minus, digits, no leading zero, 64 bits."""
    digits = text.removeprefix(b"-")
    if not digits.isdigit() or len(digits) > 19 or (digits[0] == 0x30 and text != b"0"):
        return None
    return int(text)


# --- inline commands: quotes and escapes as in redis-cli --------------------------------------------------------------

_ESCAPES: Final = {0x6E: 0x0A, 0x72: 0x0D, 0x74: 0x09, 0x62: 0x08, 0x61: 0x07}
_SPACES: Final = b" \t\n\r\v\f\0"
_QUOTE, _APOSTROPHE, _BACKSLASH, _X = 0x22, 0x27, 0x5C, 0x78


def split_inline_args(line: bytes) -> list[bytes] | None:
    """Splits an inline command into arguments; None if a quote is not closed or is not followed by a space."""
    args: list[bytes] = []
    at, end = 0, len(line)
    while True:
        while at < end and line[at] in _SPACES:
            at += 1
        if at == end:
            return args
        arg = bytearray()
        while at < end and line[at] not in _SPACES:
            if line[at] in (_QUOTE, _APOSTROPHE):
                after = _quoted(line, at, arg)
                if after is None or (after < end and line[after] not in _SPACES):
                    return None
                at = after
            else:
                arg.append(line[at])
                at += 1
        args.append(bytes(arg))


def _quoted(line: bytes, at: int, arg: bytearray) -> int | None:
    """Appends the text between the quotes to ``arg``; returns the index after the closing quote."""
    quote, end = line[at], len(line)
    at += 1
    while at < end:
        byte = line[at]
        if byte == quote:
            return at + 1
        if byte == _BACKSLASH and at + 1 < end and (quote == _QUOTE or line[at + 1] == _APOSTROPHE):
            byte, at = _escaped(line, at) if quote == _QUOTE else (_APOSTROPHE, at + 1)
        arg.append(byte)
        at += 1
    return None


def _escaped(line: bytes, at: int) -> tuple[int, int]:
    """The byte that an escape sequence stands for, and the index of its last byte."""
    symbol = line[at + 1]
    if symbol == _X:
        digits = line[at + 2 : at + 4]
        if len(digits) == 2 and digits.isalnum():
            try:
                return int(digits, 16), at + 3
            except ValueError:
                pass  # not hexadecimal: the character stands for itself
    return _ESCAPES.get(symbol, symbol), at + 1
