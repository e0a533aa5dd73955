"""One worker process, started by the supervisor with a target's name; and what that name (``millstream run
shop.app:router``) means: found, looked at, and brought to where it can run.

A target is a router, a bus, an assigned subscriber, several of them, or a function that makes them. A router without a
broker, and a function with a parameter ``broker``, get the one behind ``--url``.

A worker ends when it is told to (SIGTERM, or its parent is gone: then its standard input ends), drains within its
bound, and tells the supervisor over its standard output, a line of JSON each: that it is ready, what it leaves behind,
why it could not go on.
"""

from __future__ import annotations

import asyncio
import difflib
import importlib
import inspect
import json
import logging
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TextIO, TypeGuard

from millstream.broker import Broker, open_broker
from millstream.errors import MillstreamError
from millstream.messaging import Route, Router, place_of, run_until_signalled, text_of, traceback_of, type_of
from millstream.model import Observer, milliseconds, quiet

CLOSE_TIMEOUT_S = 30.0
log = logging.getLogger("millstream.run")

REFUSED: Final = 78
"""The exit code for what trying again cannot mend: no such module, a wrong option, a wrong password."""
_SETTLED: Final = {"messaging.acked", "messaging.retried", "messaging.lost", "messaging.entries_gone"}


class Runs(Protocol):
    """A router, a bus, an assigned subscriber, or whatever else runs until it is closed."""

    async def run(self) -> None: ...

    async def close(self) -> None: ...


class TargetRefused(MillstreamError):
    """What was named cannot be run; the message says what is there instead."""

    def __init__(self, target: str, why: str) -> None:
        self.target = target
        super().__init__(f"{target!r} cannot be run: {why}")


@dataclass(frozen=True, slots=True)
class RunTarget:
    """What was found under the name, before it was called or given a broker."""

    name: str
    found: Any

    @asynccontextmanager
    async def opened(
        self, url: str | None, *, close_timeout: float = CLOSE_TIMEOUT_S, observer: Observer = quiet
    ) -> AsyncIterator[list[Runs]]:
        """What there is to run, with its broker, for as long as the block lasts."""
        async with AsyncExitStack() as stack:
            shared: list[Broker] = []

            async def broker() -> Broker:
                if not shared:
                    if url is None:
                        raise TargetRefused(self.name, "it needs a broker. Pass --url, or set MILLSTREAM_URL.")
                    shared.append(await stack.enter_async_context(open_broker(url, observer=observer)))
                return shared[0]

            made = self.found
            if _is_maker(made):
                given = {"broker": await broker()} if "broker" in inspect.signature(made).parameters else {}
                made = made(**given)
                if inspect.isawaitable(made):
                    made = await made
                elif isinstance(made, AbstractAsyncContextManager) and not _runs(made):
                    made = await stack.enter_async_context(made)
            parts = list(made) if isinstance(made, Sequence) else [made]
            if not parts or not all(_runs(part) for part in parts):
                raise TargetRefused(self.name, f"it is {_called(made)}. {EXPECTED}")
            yield [await self._with_broker(part, broker, close_timeout) for part in parts]

    async def _with_broker(self, part: Runs, broker: Callable[[], Any], close_timeout: float) -> Runs:
        if not isinstance(part, Router) or part.broker is not None:
            return part
        whole = Router(await broker(), close_timeout_ms=round(close_timeout * 1000))
        whole.include(part)
        return whole


EXPECTED = (
    "Name a Router, a CommandBus, an EventBus, an AssignedSubscriber, a list of them, or a function that returns one "
    "(with a parameter called broker, if it needs one)."
)


def load_target(text: str, *, directory: str = ".") -> RunTarget:
    """Imports ``package.module:name``, from ``directory`` as from anywhere else.

    What is wrong with the program's text (its syntax, its imports) is refused; what else its import raises passes.
    """
    module_name, colon, name = text.partition(":")
    if not colon or not module_name or not name:
        raise TargetRefused(text, "write it as package.module:name, such as shop.app:router.")
    place = str(Path(directory).resolve())
    if place not in sys.path:
        sys.path.insert(0, place)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise TargetRefused(text, _in_the_program(error)) from error
        raise TargetRefused(text, f"there is no module {error.name!r} here. Run it from your project.") from None
    except (ImportError, SyntaxError) as error:
        raise TargetRefused(text, _in_the_program(error)) from error
    found: Any = module
    for step in name.split("."):
        if not hasattr(found, step):
            raise TargetRefused(text, f"{module_name} has no {step!r}{_did_you_mean(step, module)}")
        found = getattr(found, step)
    if not (_runs(found) or _is_maker(found) or isinstance(found, list | tuple)):
        raise TargetRefused(text, f"it is {_called(found)}. {EXPECTED}")
    return RunTarget(text, found)


def _in_the_program(error: ImportError | SyntaxError) -> str:
    said = error.msg if isinstance(error, SyntaxError) else text_of(error)
    return f"{type_of(error)}: {said} ({place_of(error)})."


def _did_you_mean(name: str, module: object) -> str:
    runnable = [each for each, value in vars(module).items() if _runs(value)]
    close = difflib.get_close_matches(name, runnable, n=1, cutoff=0.5) or runnable[:1]
    return f"; did you mean {close[0]!r}?" if close else "."


def _runs(thing: object) -> TypeGuard[Runs]:
    if inspect.isclass(thing):
        return False
    return callable(getattr(thing, "run", None)) and callable(getattr(thing, "close", None))


def _is_maker(thing: object) -> TypeGuard[Callable[..., Any]]:
    return callable(thing) and not _runs(thing)


def _called(thing: object) -> str:
    return "empty" if isinstance(thing, Sequence) and not thing else f"of the type {type(thing).__name__}"


def lifespan(
    *parts: Any, url: str | None = None, close_timeout_ms: int | None = None, close_timeout: float | None = None
) -> Callable[[Any], AbstractAsyncContextManager[None]]:
    """What ``lifespan=`` of a Starlette or FastAPI application takes. ``parts`` are what ``millstream run`` takes.

    The application starts to serve when every topic is being read, and ends after what is in flight was handled, up to
    ``close_timeout_ms`` (30,000). A part that ends with an error while the application runs raises it when the
    application ends.
    """

    patience_s = milliseconds("close_timeout", close_timeout_ms, round(CLOSE_TIMEOUT_S * 1000), close_timeout) / 1000

    @asynccontextmanager
    async def up_and_down(app: Any) -> AsyncIterator[None]:
        found = parts[0] if len(parts) == 1 else list(parts)
        async with RunTarget("lifespan", found).opened(url, close_timeout=patience_s) as running:
            tasks = [asyncio.create_task(part.run(**_own_signals(part))) for part in running]
            try:
                while not all(getattr(part, "ready", True) for part in running):
                    if any(task.done() for task in tasks):
                        break
                    await asyncio.sleep(0.01)
                for task in tasks:
                    if task.done():
                        await task
                yield
            finally:
                await asyncio.gather(*(part.close() for part in running))
                await asyncio.gather(*tasks)

    return up_and_down


def _own_signals(part: object) -> dict[str, bool]:
    """Signals belong to the web server here."""
    return {"handle_signals": False} if isinstance(part, Router) else {}


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
