"""A worker process of ``millstream run``, and the loading of its target (``shop.app:router``).

A target is a router, a bus, an assigned subscriber, several of them, or a function that makes them. A router without a
broker, and a function with a parameter ``broker``, get the broker of ``--url``.

A worker ends after SIGTERM, or when its standard input ends because the supervisor was killed. It drains within its
time limit. It reports to the supervisor over its standard output, one line of JSON per report: its consumer names, that
it is ready, how many messages it returned, the error that ended it.
"""

from __future__ import annotations

import asyncio
import difflib
import importlib
import inspect
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TextIO, TypeGuard, runtime_checkable

from millstream.broker import Broker, open_broker
from millstream.errors import MillstreamError
from millstream.messaging import Middleware, Router, run_until_signalled
from millstream.messaging.failure import place_of, text_of, traceback_of, type_of
from millstream.messaging.route import Route
from millstream.model import Observer, milliseconds, quiet
from millstream.runner.hand_over import ConsumerReports, WorkerConsumer
from millstream.runner.logs import configure_logging, flush_logs, log_context, logs_json

if TYPE_CHECKING:
    from millstream.runner.status import StatusReporter

CLOSE_TIMEOUT_S = 30.0
log = logging.getLogger("millstream.run")

REFUSED: Final = 78
"""The exit code for an error that a restart does not cure: no such module, a wrong option, a wrong password."""
TRACING_VARIABLE: Final = "MILLSTREAM_TRACING"
"""Set to 1 in the environment of a worker that records traces."""
ORPHAN_GRACE_S: Final = 5.0
"""Added to the drain time limit. Then a worker without a supervisor exits by force."""
_SETTLED: Final = {"messaging.acked", "messaging.retried", "messaging.lost", "messaging.entries_gone"}


class Runs(Protocol):
    """A router, a bus, an assigned subscriber, or another object that runs until it is closed."""

    async def run(self) -> None: ...

    async def close(self) -> None: ...


@runtime_checkable
class TakesMiddleware(Protocol):
    """A router or a bus."""

    def use(self, *middleware: Middleware) -> None: ...


class TargetRefused(MillstreamError):
    """The target cannot be run; the message names what it is instead."""

    def __init__(self, target: str, why: str) -> None:
        self.target = target
        super().__init__(f"{target!r} cannot be run: {why}")


@dataclass(frozen=True, slots=True)
class RunTarget:
    """The object that the target's name refers to, before it is called or receives a broker."""

    name: str
    value: Any

    @asynccontextmanager
    async def opened(
        self, url: str | None, *, close_timeout: float = CLOSE_TIMEOUT_S, observer: Observer = quiet
    ) -> AsyncIterator[list[Runs]]:
        """The parts to run, with their broker open while the block lasts."""
        async with AsyncExitStack() as stack:
            shared: list[Broker] = []

            async def broker() -> Broker:
                if not shared:
                    if url is None:
                        raise TargetRefused(self.name, "it needs a broker. Pass --url, or set MILLSTREAM_URL.")
                    shared.append(await stack.enter_async_context(open_broker(url, observer=observer)))
                return shared[0]

            value = self.value
            if _is_factory(value):
                arguments = {"broker": await broker()} if "broker" in inspect.signature(value).parameters else {}
                value = value(**arguments)
                if inspect.isawaitable(value):
                    value = await value
                elif isinstance(value, AbstractAsyncContextManager) and not _can_run(value):
                    value = await stack.enter_async_context(value)
            parts = list(value) if isinstance(value, Sequence) else [value]
            if not parts or not all(_can_run(part) for part in parts):
                raise TargetRefused(self.name, f"it is {_type_name(value)}. {EXPECTED}")
            yield [await self._with_broker(part, broker, close_timeout) for part in parts]

    async def _with_broker(self, part: Runs, broker: Callable[[], Any], close_timeout: float) -> Runs:
        if not isinstance(part, Router) or part.broker is not None:
            return part
        router = Router(await broker(), close_timeout_ms=round(close_timeout * 1000))
        router.include(part)
        return router


EXPECTED = (
    "Name a Router, a CommandBus, an EventBus, an AssignedSubscriber, a list of them, or a function that returns one "
    "(with a parameter called broker, if it needs one)."
)


def load_target(text: str, *, directory: str = ".") -> RunTarget:
    """Imports ``package.module:name`` from ``directory`` or from the Python path.

    Raises TargetRefused for an error of the program's text (syntax, imports). Other errors of the import are raised
    unchanged.
    """
    module_name, colon, name = text.partition(":")
    if not colon or not module_name or not name:
        raise TargetRefused(text, "write it as package.module:name, such as shop.app:router.")
    resolved_directory = str(Path(directory).resolve())
    if resolved_directory not in sys.path:
        sys.path.insert(0, resolved_directory)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise TargetRefused(text, _in_the_program(error)) from error
        raise TargetRefused(text, f"there is no module {error.name!r} here. Run it from your project.") from None
    except (ImportError, SyntaxError) as error:
        raise TargetRefused(text, _in_the_program(error)) from error
    value: Any = module
    for attribute in name.split("."):
        if not hasattr(value, attribute):
            raise TargetRefused(text, f"{module_name} has no {attribute!r}{_did_you_mean(attribute, module)}")
        value = getattr(value, attribute)
    if not (_can_run(value) or _is_factory(value) or isinstance(value, list | tuple)):
        raise TargetRefused(text, f"it is {_type_name(value)}. {EXPECTED}")
    return RunTarget(text, value)


def _in_the_program(error: ImportError | SyntaxError) -> str:
    description = error.msg if isinstance(error, SyntaxError) else text_of(error)
    return f"{type_of(error)}: {description} ({place_of(error)})."


def _did_you_mean(name: str, module: object) -> str:
    runnable = [attribute for attribute, value in vars(module).items() if _can_run(value)]
    close = difflib.get_close_matches(name, runnable, n=1, cutoff=0.5) or runnable[:1]
    return f"; did you mean {close[0]!r}?" if close else "."


def _can_run(candidate: object) -> TypeGuard[Runs]:
    if inspect.isclass(candidate):
        return False
    return callable(getattr(candidate, "run", None)) and callable(getattr(candidate, "close", None))


def _is_factory(candidate: object) -> TypeGuard[Callable[..., Any]]:
    return callable(candidate) and not _can_run(candidate)


def _type_name(value: object) -> str:
    return "empty" if isinstance(value, Sequence) and not value else f"of the type {type(value).__name__}"


def lifespan(
    *parts: Any, url: str | None = None, close_timeout_ms: int | None = None
) -> Callable[[Any], AbstractAsyncContextManager[None]]:
    """The ``lifespan=`` argument of a Starlette or FastAPI application. ``parts`` are what ``millstream run`` takes.

    The application starts to serve when every topic is being read. It ends after messages in flight were handled, for
    ``close_timeout_ms`` (30,000) at most. If a part ends with an error while the application runs, the error is raised
    when the application ends.
    """

    timeout_s = milliseconds("close_timeout", close_timeout_ms, round(CLOSE_TIMEOUT_S * 1000)) / 1000

    @asynccontextmanager
    async def up_and_down(app: Any) -> AsyncIterator[None]:
        value = parts[0] if len(parts) == 1 else list(parts)
        async with RunTarget("lifespan", value).opened(url, close_timeout=timeout_s) as running:
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
    """Options for ``run``: the web server handles the signals."""
    return {"handle_signals": False} if isinstance(part, Router) else {}


class UnsettledCount:
    """Observer that counts entries that were received and are not settled: the drain returns these to the group."""

    def __init__(self) -> None:
        self.received = 0
        self.settled = 0

    def __call__(self, name: str, /, **values: Any) -> None:
        if name == "messaging.received":
            self.received += values.get("entries", 1)
        elif name in _SETTLED:
            self.settled += values.get("entries", 1)
        elif name == "messaging.dead_lettered":
            self.settled += 1

    @property
    def left(self) -> int:
        return max(0, self.received - self.settled)


def handlers_of(parts: Sequence[object]) -> list[Route]:
    return [route for part in parts if callable(getattr(part, "routes", None)) for route in part.routes()]  # type: ignore[attr-defined]  # checked in the same line


def chosen_consumers(routes: Sequence[Route]) -> list[WorkerConsumer]:
    """Consumer names that the program chose. No two processes may read under the same name."""
    return [
        WorkerConsumer(route.topic, route.group, str(route.options["consumer"]))
        for route in routes
        if route.group is not None and route.options.get("consumer") is not None
    ]


async def serve(
    target: RunTarget,
    url: str | None,
    drain_s: float,
    report_to: TextIO,
    status: StatusReporter | None = None,
    watch: OrphanWatch | None = None,
) -> None:
    """Runs the target until a signal arrives or the supervisor is gone."""
    unsettled = UnsettledCount()
    consumers = ConsumerReports(lambda consumer: _report(report_to, consumer=consumer))

    def observe(name: str, /, **values: Any) -> None:
        unsettled(name, **values)
        consumers(name, **values)
        if status is not None:
            status(name, **values)

    async with target.opened(url, close_timeout=drain_s, observer=observe) as parts:
        if names := chosen_consumers(handlers_of(parts)):
            _report(report_to, chosen_consumers=names)
        for part in parts:
            if logs_json() and isinstance(part, TakesMiddleware):
                part.use(log_context())
        if status is not None:
            await status.start(parts)
        close_all = _closer(parts)
        reporting = asyncio.create_task(_report_ready(parts, report_to))
        if watch is not None:
            watch.close_with(_from_another_thread(close_all))
        try:
            # SIGTERM can arrive twice: from the supervisor, and from systemd with its default KillMode or a container's
            # init, which signal every process of a service. To end at once, the supervisor sends SIGINT.
            await run_until_signalled(_run_all(parts), close_all, ignore_repeats=True)
        finally:
            reporting.cancel()
            if status is not None:
                await status.close()
    _report(report_to, stopped=True, received=unsettled.received, handed_back=unsettled.left)


async def _run_all(parts: Sequence[Runs]) -> None:
    async with asyncio.TaskGroup() as group:
        for part in parts:
            group.create_task(part.run(handle_signals=False) if _takes_signals(part) else part.run())  # type: ignore[call-arg]  # checked in the same line


def _takes_signals(part: Runs) -> bool:
    return "handle_signals" in inspect.signature(part.run).parameters


def _closer(parts: Sequence[Runs]) -> Callable[[], Awaitable[None]]:
    async def close_all() -> None:
        await asyncio.gather(*(part.close() for part in parts))

    return close_all


def _from_another_thread(close: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    loop = asyncio.get_running_loop()
    closing: list[asyncio.Future[None]] = []

    def begin() -> None:
        try:
            loop.call_soon_threadsafe(lambda: closing.append(asyncio.ensure_future(close())))
        except RuntimeError:
            pass  # the loop has ended, and the process is about to

    return begin


async def _report_ready(parts: Sequence[Runs], report_to: TextIO) -> None:
    while not all(getattr(part, "ready", True) for part in parts):  # noqa: ASYNC110 (there is no event for being ready)
        await asyncio.sleep(0.05)
    _report(report_to, ready=True)


class OrphanWatch:
    """Ends this process after its supervisor was killed, which it detects by the end of its standard input.

    It is a thread and not a callback of the event loop: a handler may block the loop, and the loop does not run yet
    while the target is imported and opened.
    """

    def __init__(self, drain_s: float) -> None:
        self._limit_s = drain_s + ORPHAN_GRACE_S
        self._lock = threading.Lock()
        self._close: Callable[[], object] | None = None
        self._is_orphaned = False

    def start(self) -> None:
        threading.Thread(target=self._run, name="millstream-orphan-watch", daemon=True).start()

    def close_with(self, close: Callable[[], object]) -> None:
        """From now on a drain is possible: ``close`` starts it, called from another thread."""
        with self._lock:
            self._close = close
            if self._is_orphaned:
                close()

    def _run(self) -> None:
        try:
            while os.read(0, 1024):
                pass
        except OSError:
            pass  # standard input was closed, which means the same as its end
        with self._lock:
            self._is_orphaned = True
            if self._close is None:
                log.warning("the supervisor is gone; this process has not started to read and exits")
                flush_logs()
                os._exit(1)
            log.warning("the supervisor is gone; draining for up to %g s", self._limit_s)
            self._close()
        time.sleep(self._limit_s)
        log.error("the supervisor is gone and handlers did not end; exiting. Other consumers claim their messages.")
        flush_logs()
        os._exit(1)


def _report(report_to: TextIO, **values: Any) -> None:
    try:
        report_to.write(json.dumps(values) + "\n")
        report_to.flush()
    except OSError:
        pass  # the supervisor is gone


def log_to_stderr(level: str, log_format: str = "text") -> None:
    """Log lines of the same form in all processes of a run, each with its process id."""
    configure_logging(level, log_format)


def restore_signals_in_children() -> None:
    """Forked children of a handler (``multiprocessing``) get the present signal handlers instead of the event loop's.

    With those a child would ignore SIGTERM, and this process would drain, because both share the pipe by which signals
    reach the event loop.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    masks = threading.local()  # two threads may fork at the same time

    def block() -> None:  # a signal between the fork and the new handlers waits
        masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, handlers)

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.before)

    def restore() -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=restore)


def main() -> None:
    target, drain_s, level, log_format, status_fd = sys.argv[1], float(sys.argv[2]), *sys.argv[3:6]
    report_to = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the application prints must not appear among the report lines
    log_to_stderr(level, log_format)
    restore_signals_in_children()
    watch = OrphanWatch(drain_s)
    watch.start()
    stop_tracing: Callable[[], None] | None = None
    try:
        if os.environ.get(TRACING_VARIABLE) == "1":
            stop_tracing = _start_tracing()
        status = _status_reporter(int(status_fd)) if status_fd else None
        asyncio.run(serve(load_target(target), os.environ.get("MILLSTREAM_URL"), drain_s, report_to, status, watch))
    except Exception as raised:  # of any kind: the supervisor logs it once, with the place where it happened
        error = _first(raised)
        known = isinstance(error, MillstreamError)
        where = "" if known else f" ({place_of(error)})"
        trace = "" if known else traceback_of(error)
        kind = type(error).__name__ if known else type_of(error)
        is_retryable = known and getattr(error, "retryable", False)
        _report(report_to, error=f"{kind}: {text_of(error)}{where}", traceback=trace, retryable=is_retryable)
        sys.exit(REFUSED if known and not is_retryable else 1)
    finally:
        if stop_tracing is not None:
            stop_tracing()


def _start_tracing() -> Callable[[], None]:
    """Imported only if tracing is enabled: OpenTelemetry adds to the memory and the start of every worker."""
    from millstream.observe.tracing import start_sdk

    return start_sdk()


def _status_reporter(fd: int) -> StatusReporter:
    """Imported only if metrics are served: prometheus_client would add to the memory of every worker."""
    from millstream.runner.status import StatusReporter

    os.set_inheritable(fd, False)
    return StatusReporter(fd)


def _first(group: BaseException) -> BaseException:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


if __name__ == "__main__":
    main()
