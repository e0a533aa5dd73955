"""Chromium and a dashboard on a real Redis; one of each per module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browsing import ARGUMENTS, Running, chromium, running, watched_page
from playwright.sync_api import Browser, Page, expect, sync_playwright

from millstream.testing import RedisProcess
from millstream.wire import Command

# A long timeout, because a busy machine may need seconds. A wait that succeeds ends at once.
expect.set_options(timeout=30_000)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=list(ARGUMENTS))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def module_dashboard(shared_redis: RedisProcess) -> Iterator[Running]:
    with running(shared_redis.url) as dashboard:
        yield dashboard


@pytest.fixture
def dashboard(module_dashboard: Running) -> Running:
    """Over an empty Redis."""
    module_dashboard.broker.transport.call(Command((b"FLUSHALL",)))
    return module_dashboard


@pytest.fixture
def page(browser: Browser, dashboard: Running) -> Iterator[Page]:
    with watched_page(browser, dashboard.url) as page:
        yield page
