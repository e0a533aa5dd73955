"""The log handler for standard error: bounded, in order, and it never waits for the reader."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from millstream.observe import stderr_handler
from millstream.observe.stderr_handler import StderrHandler
from millstream.testing import wait_until


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read_end, write_end = os.pipe()
    yield read_end, write_end
    for fd in (read_end, write_end):
        try:
            os.close(fd)
        except OSError:
            pass  # the test has closed it


def logger_of(handler: StderrHandler) -> logging.Logger:
    logger = logging.Logger("shop")
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logger.addHandler(handler)
    return logger


def read_until(fd: int, end: str) -> str:
    data = b""
    while end.encode() not in data:
        data += os.read(fd, 1 << 16)
    return data.decode()


def test_lines_are_written_in_order(pipe: tuple[int, int]) -> None:
    handler = StderrHandler(pipe[1])
    logger = logger_of(handler)
    for number in range(100):
        logger.warning("line %d", number)
    handler.flush()
    assert os.read(pipe[0], 1 << 16).decode() == "".join(f"WARNING line {number}\n" for number in range(100))


def test_lines_beyond_the_limit_are_dropped_and_counted(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stderr_handler, "MAX_WAITING_BYTES", 100_000)
    monkeypatch.setattr(stderr_handler, "FLUSH_TIMEOUT_S", 0.01)
    handler = StderrHandler(pipe[1])
    logger = logger_of(handler)
    for number in range(1_000):
        logger.warning("line %d %s", number, "x" * 1_000)
    handler.flush()  # ends although no process reads

    text = read_until(pipe[0], "was not read\n")
    numbers = [int(number) for number in re.findall(r"line (\d+) x{1000}\n", text)]
    assert numbers == list(range(len(numbers)))
    assert 90 <= len(numbers) <= 200  # the limit and what fits into the pipe
    assert text.endswith(f"\nWARNING {1_000 - len(numbers)} log lines were dropped here: standard error was not read\n")

    logger.warning("read again")
    assert read_until(pipe[0], "again\n") == "WARNING read again\n"


def test_nothing_is_dropped_while_the_reader_reads(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that logs without a pause is faster than the thread that writes."""
    monkeypatch.setattr(stderr_handler, "MAX_WAITING_BYTES", 1_000)
    monkeypatch.setattr(stderr_handler, "PATIENCE_S", 60)
    texts: list[str] = []
    reader = threading.Thread(target=lambda: texts.append(read_until(pipe[0], "the end\n")))
    reader.start()
    logger = logger_of(StderrHandler(pipe[1]))
    for number in range(5_000):
        logger.warning("line %d", number)
    logger.warning("the end")
    reader.join()
    assert re.findall(r"line (\d+)\n", texts[0]) == [str(number) for number in range(5_000)]


def test_line_longer_than_the_limit_is_written(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stderr_handler, "MAX_WAITING_BYTES", 10)
    logger_of(StderrHandler(pipe[1])).warning("x" * 1_000)
    assert read_until(pipe[0], "\n") == f"WARNING {'x' * 1_000}\n"


def test_missing_reader_is_no_error(pipe: tuple[int, int]) -> None:
    os.close(pipe[0])
    handler = StderrHandler(pipe[1])
    logger_of(handler).warning("lost")
    handler.flush()
    assert not handler._lines


def test_non_blocking_pipe_is_written_completely(pipe: tuple[int, int]) -> None:
    os.set_blocking(pipe[1], False)
    handler = StderrHandler(pipe[1])
    logger_of(handler).warning("%s end", "x" * 300_000)
    assert len(read_until(pipe[0], " end\n")) == len("WARNING ") + 300_000 + len(" end\n")


def test_record_that_cannot_be_formatted_is_reported(pipe: tuple[int, int]) -> None:
    logger_of(StderrHandler(pipe[1])).warning("%d", "not a number")
    text = read_until(pipe[0], "a real number is required, not str\n")
    assert text.startswith(f"cannot format the log line of {__file__}:")


def test_forked_child_writes_its_own_lines_only(pipe: tuple[int, int]) -> None:
    handler = StderrHandler(pipe[1])
    logger = logger_of(handler)
    logger.warning("x" * 200_000)  # more than the pipe holds: it waits while the child starts
    wait_until(lambda: handler._thread is not None)
    child = os.fork()
    if child == 0:
        logger.warning("child")
        with handler._changed:
            os._exit(0 if handler._changed.wait_for(lambda: not handler._lines, 60) else 1)
    text = read_until(pipe[0], "child\n")
    assert os.waitpid(child, 0)[1] == 0
    assert text.count("child") == 1


def test_end_of_the_process_writes_all_lines() -> None:
    program = (
        "import logging; from millstream.observe.stderr_handler import StderrHandler\n"
        "logging.basicConfig(handlers=[StderrHandler()], format='%(message)s')\n"
        "for number in range(500): logging.warning('line %d', number)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr.splitlines() == [f"line {number}" for number in range(500)]
