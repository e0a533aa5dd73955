"""A served dashboard, a browser that shows it, and coroutines that run during browser calls."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
from playwright.sync_api import Browser, Page

from millstream import BlockingBroker, open_blocking_broker
from millstream.dashboard import Dashboard
from millstream.observe.http import HttpServer

ARGUMENTS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
PAUSE_S = 0.2
"""The interval between updates, shorter than for users."""


class Running(NamedTuple):
    """A dashboard, and a broker of what it shows."""

    url: str
    redis_url: str
    broker: BlockingBroker
    dashboard: Dashboard


@contextmanager
def running(url: str, **options: Any) -> Iterator[Running]:
    dashboard = Dashboard(url, pause_s=PAUSE_S, **options)
    with HttpServer(dashboard, port=0, on_stop=dashboard.feed.end) as server, open_blocking_broker(url) as broker:
        yield Running(server.url, url, broker, dashboard)
    in_thread(dashboard.close)


def in_thread(work: Callable[[], Awaitable[Any]]) -> Any:
    """Runs a coroutine while Playwright uses the event loop of this thread."""
    result: list[Any] = []
    failed: list[BaseException] = []

    async def awaited() -> None:
        result.append(await work())

    def run() -> None:
        try:
            asyncio.run(awaited())
        except BaseException as error:  # raised in the thread of the test
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()  # however long it takes: a test has its own limit
    if failed:
        raise failed[0]
    return result[0]


def chromium() -> str:
    result = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if result is None:
        if os.environ.get("CI"):
            pytest.fail("Chromium is not installed, and in CI it must be: run `make setup`")
        pytest.skip("Chromium is not installed: run `make setup`")
    return result


@contextmanager
def watched_page(browser: Browser, url: str, **options: Any) -> Iterator[Page]:
    """A page whose scripts may not fail, and that may not try anything that the policy forbids."""
    context = browser.new_context(base_url=url, viewport={"width": 1280, "height": 900}, **options)
    context.set_default_timeout(30_000)
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "console", lambda output: problems.append(output.text) if "Content Security Policy" in output.text else None
    )
    yield page
    context.close()
    assert problems == []
