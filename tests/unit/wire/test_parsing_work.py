"""The cost of parsing: lengths are checked before memory is allocated, and no byte is parsed repeatedly.

Work is counted, not timed: executed lines of our parser, bytes that it examined, bytes passed to hiredis.
"""

import sys
import tracemalloc

import hiredis
import pytest

from millstream.wire import requests as module
from millstream.wire.requests import UNAUTHENTICATED, RequestLimits, RequestParser
from millstream.wire.resp import pack

PING = pack([b"PING"])
XADD = pack([b"XADD", b"s", b"*", b"field", b"value"])


class Work:
    def __init__(self) -> None:
        self.lines = self.given = self.searched = 0

    def total(self) -> int:
        return self.lines + self.given + self.searched


@pytest.fixture
def work(monkeypatch):
    counted = Work()

    class Reader(hiredis.Reader):
        def feed(self, data, *arguments):
            counted.given += len(data)
            return super().feed(data, *arguments)

    class Buffer(bytearray):
        def find(self, what, start=0, end=sys.maxsize):
            result = super().find(what, start, end)
            counted.searched += (min(len(self), end) if result < 0 else result) - start
            return result

    monkeypatch.setattr(module.hiredis, "Reader", Reader)
    monkeypatch.setattr(module, "bytearray", Buffer, raising=False)
    return counted


def lines_of(counted, run):
    """Runs it, and counts the lines of the parser's own module."""

    def trace(frame, event, argument):
        if frame.f_code.co_filename != module.__file__:
            return None
        counted.lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return run()
    finally:
        sys.settrace(before)


def fed(pieces, limits=None):
    parser = RequestParser(limits or RequestLimits())
    result = []
    for piece in pieces:
        requests = parser.feed(piece)
        result += requests
        while requests and parser.more:
            requests = parser.feed(b"")
            result += requests
    return result, parser.fault


def cost(work, pieces, limits=None):
    before = work.total()
    lines_of(work, lambda: fed(pieces, limits))
    return work.total() - before


SHAPES = {
    "small ones, then a line": lambda n: [PING * n + b"PING\r\n"],
    "small ones, then nonsense": lambda n: [PING * n + b"*1\r\n:5\r\n"],
    "small ones, then half of one": lambda n: [PING * n + b"*1\r\n$4\r\nPI"],
    "small ones, then too many words": lambda n: [PING * n + b"*2147483647\r\n"],
    "one and a line by turns": lambda n: [(PING + b"PING\r\n") * n],
    "many and a line by turns": lambda n: [(PING * 50 + b"PING\r\n") * (n // 50)],
    "one and an empty one by turns": lambda n: [(PING + b"*-1\r\n") * n],
    "one and one with another spelling of its length by turns": lambda n: [(PING + b"*-0\r\n") * n],
    "lines": lambda n: [b"PING\r\n" * n],
    "a form from a browser": lambda n: [b"POST / HTTP/1.1\r\nHost: x\r\n\r\n" + PING * n + b"PING\r\n"],
    "pieces that end in mid-request": lambda n: [XADD[:9], *([XADD[9:] + XADD * 40 + XADD[:9]] * (n // 40))],
    "pieces that end in mid-request, and a line in each": lambda n: (
        [XADD[:9], *([XADD[9:] + XADD * 20 + b"PING\r\n" + XADD * 20 + XADD[:9]] * (n // 40))]
    ),
    "a long line, byte by byte": lambda n: [b"x"] * (n * 8),
    "a number without an end, byte by byte": lambda n: [b"*"] + [b"1"] * (n * 8),
    "a request, byte by byte": lambda n: [bytes([byte]) for byte in XADD * (n // 8)],
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("limits", [RequestLimits(), UNAUTHENTICATED], ids=["known", "unknown"])
def test_parsing_work_is_linear(work, shape, limits):
    once, twice = (cost(work, shape(size), limits) for size in (1000, 2000))
    assert once <= twice <= 2.2 * once


@pytest.mark.parametrize(
    "raw",
    [
        b"*2147483647\r\n",
        PING + b"*2147483647\r\n",
        b"*1\r\n*2147483647\r\n",
        b"%2147483647\r\n",
        b"~2147483647\r\n",
        b">2147483647\r\n",
        b"*1\r\n%1073741823\r\n",
        b"*2\r\n$1\r\naxx~50000000\r\n",
        b"*2\r\n$1\r\naxx>50000000\r\n",
        b"*2\r\n$1\r\naxx|50000000\r\n",
        b"*999999\r\n" * 9,
        b"*1048576\r\n$1\r\nx\r\n",
        b"$536870912\r\n",
        b"*1\r\n$536870912\r\n",
        b"POST / HTTP/1.1\r\n\r\n*2147483647\r\n",
        b"PING\r\n*2147483647\r\n",
    ],
    ids=lambda raw: repr(raw[:28]),
)
def test_announced_items_allocate_no_memory(raw):
    parser = RequestParser(RequestLimits())
    tracemalloc.start()
    try:
        parser.feed(raw)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_data_after_an_http_request_is_ignored(work):
    body = PING * 4000 + b"*1\r\n:5\r\n"
    for verb in (b"POST / HTTP/1.1\r\n", b"PING\r\nhost: localhost\r\n"):
        parser = RequestParser(RequestLimits())
        lines_of(work, lambda parser=parser, verb=verb: parser.feed(verb + body))
        assert parser.hostile
        assert parser.feed(PING) == []
    assert work.lines < 500
