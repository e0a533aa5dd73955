"""One worker process: started by the supervisor with the target's name.

It ends when it is told to (SIGTERM, or its parent is gone: then its standard input ends), drains within its bound, and
tells the supervisor over its standard output, a line of JSON each: that it is ready, what it leaves behind, why it
could not go on.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TextIO

from millstream.errors import MillstreamError
from millstream.messaging import Route, place_of, run_until_signalled, text_of, traceback_of, type_of
from millstream.runner.target import Runs, RunTarget, load_target

log = logging.getLogger("millstream.run")

REFUSED: Final = 78
"""The exit code for what trying again cannot mend: no such module, a wrong option, a wrong password."""
_SETTLED: Final = {"messaging.acked", "messaging.retried", "messaging.lost", "messaging.entries_gone"}


class InHand:
    """Counts what was read and not yet settled: at the end, that is what was handed back."""

    def __init__(self) -> None:
        self.received = 0
        self.settled = 0

    def __call__(self, name: str, /, **facts: Any) -> None:
        if name == "messaging.received":
            self.received += facts.get("entries", 1)
        elif name in _SETTLED:
            self.settled += facts.get("entries", 1)
        elif name == "messaging.buried":
            self.settled += 1

    @property
    def left(self) -> int:
        return max(0, self.received - self.settled)


def handlers_of(parts: Sequence[object]) -> list[Route]:
    return [route for part in parts if callable(getattr(part, "routes", None)) for route in part.routes()]  # type: ignore[attr-defined]  # asked for in the same line


async def serve(target: RunTarget, url: str | None, drain_s: float, told: TextIO) -> None:
    """Runs until it is signalled, or its parent is gone."""
    in_hand = InHand()
    async with target.opened(url, close_timeout=drain_s, observer=in_hand) as parts:
        close_all = _closer(parts)
        watching = asyncio.create_task(_tell_ready(parts, told))
        unwatch = _close_when_orphaned(close_all)
        try:
            await run_until_signalled(_run_all(parts), close_all)
        finally:
            watching.cancel()
            unwatch()
    _tell(told, stopped=True, received=in_hand.received, handed_back=in_hand.left)


async def _run_all(parts: Sequence[Runs]) -> None:
    async with asyncio.TaskGroup() as group:
        for part in parts:
            group.create_task(part.run(handle_signals=False) if _takes_signals(part) else part.run())  # type: ignore[call-arg]  # asked for in the same line


def _takes_signals(part: Runs) -> bool:
    return "handle_signals" in inspect.signature(part.run).parameters


def _closer(parts: Sequence[Runs]) -> Callable[[], Awaitable[None]]:
    async def close_all() -> None:
        await asyncio.gather(*(part.close() for part in parts))

    return close_all


async def _tell_ready(parts: Sequence[Runs], told: TextIO) -> None:
    while not all(getattr(part, "ready", True) for part in parts):  # noqa: ASYNC110 (there is no event for being ready)
        await asyncio.sleep(0.05)
    _tell(told, ready=True)


def _close_when_orphaned(close: Callable[[], Awaitable[None]]) -> Callable[[], object]:
    """Closes when standard input ends: a supervisor that was killed cannot say so. Returns what ends the watch."""
    loop = asyncio.get_running_loop()

    def heard() -> None:
        if not os.read(0, 1024):
            loop.remove_reader(0)
            log.warning("the supervisor is gone: closing")
            closing.append(asyncio.ensure_future(close()))

    closing: list[asyncio.Future[None]] = []
    loop.add_reader(0, heard)
    return lambda: loop.remove_reader(0)


def _tell(told: TextIO, **facts: Any) -> None:
    try:
        told.write(json.dumps(facts) + "\n")
        told.flush()
    except OSError:
        pass  # nobody listens any more


def log_to_stderr(level: str) -> None:
    """The same lines from all processes of a run, each with its process's number."""
    logging.basicConfig(level=level.upper(), format=f"%(asctime)s %(levelname)s {os.getpid()} %(name)s: %(message)s")


def main() -> None:
    target, drain_s, level = sys.argv[1], float(sys.argv[2]), sys.argv[3]
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the application prints goes where its log goes, not among our lines
    log_to_stderr(level)
    try:
        asyncio.run(serve(load_target(target), os.environ.get("MILLSTREAM_URL"), drain_s, told))
    except Exception as raised:  # whatever it was: the supervisor tells it, once and with where it happened
        error = _first(raised)
        known = isinstance(error, MillstreamError)
        where = "" if known else f" ({place_of(error)})"
        trace = "" if known else traceback_of(error)
        kind = type(error).__name__ if known else type_of(error)
        _tell(told, error=f"{kind}: {text_of(error)}{where}", traceback=trace)
        sys.exit(REFUSED if known and not getattr(error, "retryable", False) else 1)


def _first(group: BaseException) -> BaseException:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


if __name__ == "__main__":
    main()
