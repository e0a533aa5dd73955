"""The cost of a dashboard: a large overview, a hundred open pages compared with one, and an idle page."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Message, Scope

from benchmarks import Progress, Result
from millstream import Broker, open_broker
from millstream.dashboard import Dashboard
from millstream.testing import RedisProcess
from millstream.wire import Command

MANY = 10_000
SOME = 1_000
PAGES = 100
LOOKS = 5
IDLE_S = 20.0


def run(rounds: int, progress: Progress) -> list[Result]:
    with RedisProcess() as server:
        return asyncio.run(_run(server.url, rounds, progress))


async def _run(url: str, rounds: int, progress: Progress) -> list[Result]:
    async with open_broker(url) as broker:
        progress(f"the overview of {MANY:,} streams")
        await _fill(broker, MANY)
        overview_ms = await _overview_ms(url, rounds)
        await _fill(broker, SOME)
        progress(f"{PAGES} open pages, compared with one")
        one_page, many = await _commands(url, broker, 1), await _commands(url, broker, PAGES)
        progress(f"an open overview of {SOME:,} streams")
        idle = await _idle(url)
    return [
        Result("dashboard_overview_ms", overview_ms, "ms of work", goal="<= 500"),
        Result("dashboard_pages", many, "commands (per reading)", "one page", one_page, goal="<= 1.2 x"),
        Result("dashboard_idle", idle, "% of a core", goal="< 3"),
    ]


async def _fill(broker: Broker, count: int) -> None:
    await broker.transport.call(Command((b"FLUSHALL",)))
    for number in range(count):
        await broker.xadd(f"stream-{number}", {"n": "1"})
        await broker.create_group(f"stream-{number}", "g", start="0")


async def _overview_ms(url: str, rounds: int) -> float:
    """The time for one response of the overview page, with stream stats that do not change."""
    async with Dashboard(url, pause_s=600) as dashboard:
        await dashboard.stats.request()
        await _get(dashboard, "/")
        figures = []
        for _ in range(max(3, rounds)):
            began = time.process_time()
            body = await _get(dashboard, "/")
            figures.append((time.process_time() - began) * 1000)
            assert b"stream-" in body
        return statistics.median(figures)


async def _get(dashboard: Dashboard, path: str) -> bytes:
    """One request without a socket, so that only the page is measured."""
    body = b""

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        nonlocal body
        body += message.get("body", b"")

    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": path,
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"127.0.0.1")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8090),
    }
    await dashboard(scope, receive, send)
    return body


@asynccontextmanager
async def _open(dashboard: Dashboard, count: int) -> AsyncIterator[None]:
    async def listen() -> None:
        async for _ in dashboard.feed.events(["/"], [], ""):
            pass

    pages = [asyncio.create_task(listen()) for _ in range(count)]
    await dashboard.stats.request()
    await dashboard.stats.wait(2)
    yield
    for page in pages:
        page.cancel()
    await asyncio.gather(*pages, return_exceptions=True)


async def _commands(url: str, broker: Broker, pages: int) -> float:
    """Redis commands per reading of the stream stats with this many open pages, including the examinations of every 30
    s."""
    async with Dashboard(url) as dashboard, _open(dashboard, pages):
        before, first = await _processed(broker), dashboard.stats.version
        last = await dashboard.stats.wait(first + LOOKS - 1)
        return (await _processed(broker) - before) / (last - first)


async def _processed(broker: Broker) -> int:
    return int((await broker.server_info("stats"))["total_commands_processed"])


async def _idle(url: str) -> float:
    """Percent of a core that this process uses while a page is open and nothing changes."""
    async with Dashboard(url) as dashboard, _open(dashboard, 1):
        began, busy = time.monotonic(), time.process_time()
        await asyncio.sleep(IDLE_S)
        return 100 * (time.process_time() - busy) / (time.monotonic() - began)
