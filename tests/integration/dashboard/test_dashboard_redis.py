"""The requests of a dashboard to a real Redis, with restricted users and with huge entries."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx
import pytest

from millstream import Broker, open_broker
from millstream.broker import Limits
from millstream.broker.operations.info import read_stream_stats
from millstream.dashboard import Dashboard
from millstream.testing import eventually
from millstream.wire import Command

HERE = "http://127.0.0.1:8090"


def client(dashboard: Dashboard) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=dashboard), base_url=HERE, timeout=60)


@contextlib.asynccontextmanager
async def open_pages(dashboard: Dashboard, address: str, count: int, others: int = 0) -> AsyncIterator[None]:
    """Opens ``count`` pages at one address until the block ends; ``others`` is the number of pages at other
    addresses."""

    async def listen() -> None:
        async for _ in dashboard.feed.events([address], [], ""):
            pass

    pages = [asyncio.create_task(listen()) for _ in range(count)]
    await eventually(lambda: dashboard.feed.connections == count + others, what="the pages")
    yield
    for page in pages:
        page.cancel()
    await asyncio.gather(*pages, return_exceptions=True)


async def commands(broker: Broker) -> int:
    return int((await broker.server_info("stats"))["total_commands_processed"])


@pytest.mark.parametrize("address", ["/", "/stream?name=s1", "/dead-letters"])
async def test_hundred_pages_share_the_queries_of_one(redis_broker: Broker, redis_url: str, address: str) -> None:
    for number in range(20):
        await redis_broker.create_group(f"s{number}", "g", start="0")
    counted = []
    for pages in (1, 100):
        async with Dashboard(redis_url, pause_s=0.05) as dashboard, open_pages(dashboard, address, pages):
            await dashboard.stats.wait(2)
            before, looks = await commands(redis_broker), dashboard.stats.version
            # So many that a reading that overlaps the begin or the end, and queries memory too, is less than a fifth.
            await dashboard.stats.wait(looks + 20)
            counted.append((await commands(redis_broker) - before) / (dashboard.stats.version - looks))
    assert counted[1] <= 1.2 * counted[0], counted


async def test_user_without_memory_usage_and_info_sees_other_values(redis_broker: Broker, redis_url: str) -> None:
    await redis_broker.xadd("orders", {"n": "1"})
    rules = (b"ACL", b"SETUSER", b"watcher", b"on", b">pw", b"~*", b"+@read", b"+@stream", b"+ping", b"+time", b"+scan")
    await redis_broker.transport.call(Command((*rules, b"+hello", b"+client", b"-memory", b"-info", b"-config")))
    try:
        async with Dashboard(redis_url.replace("//", "//watcher:pw@")) as dashboard, client(dashboard) as http:
            page = await http.get("/")
            assert "Memory is not shown: this user may not run MEMORY USAGE." in page.text
            assert "unknown: this user may not run INFO" in page.text
            assert "orders" in page.text
            stream = await http.get("/stream?name=orders")
            assert "unknown: this user may not run MEMORY USAGE" in stream.text
            assert "watcher:pw" not in page.text + stream.text
    finally:
        await redis_broker.transport.call(Command((b"ACL", b"DELUSER", b"watcher")))


def for_large_entries(url: str) -> Broker:
    return open_broker(url, limits=Limits(max_entry_bytes=200 << 20), deadline_ms=60_000)


async def test_entry_of_a_hundred_megabytes_is_cut_on_its_page(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.dashboard.app.DEADLINE_MS", 60_000)  # this machine may be busy
    async with for_large_entries(redis_url) as broker:
        await broker.xadd("big", {"payload": b"x" * 100_000_000})
        await broker.xadd("big", {"n": "small"})
    async with Dashboard(redis_url) as dashboard, client(dashboard) as http:
        page = await http.get("/stream?name=big")
        assert page.status_code == 200
        assert "100.0 MB" in page.text
        assert "The first 16.4 kB of 100.0 MB." in page.text
        assert len(page.content) < 200_000
        overview = await http.get("/")
        assert "big" in overview.text


async def bytes_sent(broker: Broker) -> int:
    return int((await broker.server_info("stats"))["total_net_output_bytes"])


async def test_huge_entry_is_not_transferred_with_every_update(redis_broker: Broker, redis_url: str) -> None:
    async with for_large_entries(redis_url) as broker:
        await broker.xadd("big", {"payload": b"x" * 100_000_000})
    await redis_broker.create_group("big", "g", start="0")
    before = await bytes_sent(redis_broker)
    async with Dashboard(redis_url, pause_s=0.05) as dashboard:
        async with open_pages(dashboard, "/", 1), open_pages(dashboard, "/stream?name=big", 1, others=1):
            await dashboard.stats.wait(12)  # memory is queried twice
            await eventually(lambda: dashboard.stats.findings_of("big") != [], what="the examination")
        row = next(row for row in dashboard.stats.rows if row.stream == "big")
        assert (row.length, row.lag) == (1, 1)
        assert row.added_per_s is None, "the number of added entries is unknown and not guessed"
    assert await bytes_sent(redis_broker) - before < 1_000_000


async def test_unreadable_large_entries_do_not_hide_the_page(redis_broker: Broker, redis_url: str) -> None:
    async with for_large_entries(redis_url) as broker:
        await broker.xadd("big", {"payload": b"x" * 20_000_000})
    await redis_broker.create_group("big", "readers", start="0")
    limit = (b"CONFIG", b"SET", b"client-output-buffer-limit")
    await redis_broker.transport.call(Command((*limit, b"normal 4mb 4mb 1")))
    try:
        async with Dashboard(redis_url) as dashboard, client(dashboard) as http:
            for follow in ("", "&follow=1"):
                page = await http.get(f"/stream?name=big{follow}")
                assert page.status_code == 200
                assert "are too large to be read in time" in page.text
                assert ">readers</td>" in page.text
    finally:
        await redis_broker.transport.call(Command((*limit, b"normal 0 0 0")))


async def test_large_last_entry_is_transferred_once(redis_broker: Broker, redis_url: str) -> None:
    """The mean size does not show it. It is noticed once it was transferred, and not transferred again until the next
    memory query."""
    await redis_broker.xadd_many("long", [{"n": "1"}] * 1_000)
    await redis_broker.xadd("long", {"x": b"x" * 8_000_000})
    await redis_broker.create_group("long", "g", start="0")
    await redis_broker.xreadgroup("long", "g", "c", count=1)
    first = {item.name: item for item in await redis_broker.run(read_stream_stats, ["long"])}
    assert first["long"].heavy
    assert first["long"].entries_added == 1_001
    before = await bytes_sent(redis_broker)
    again = await redis_broker.run(read_stream_stats, ["long"], memory=False, before=first)
    assert (again[0].length, again[0].heavy, again[0].last_generated) == (1_001, True, None)
    assert again[0].entries_added == 1_001, "the group has read 1, and 1,000 are left to it"
    assert again[0].memory_bytes == first["long"].memory_bytes
    assert await bytes_sent(redis_broker) - before < 100_000


async def test_follower_of_large_entries_receives_the_newest_that_fit(redis_broker: Broker, redis_url: str) -> None:
    ids = [await redis_broker.xadd("large", {"x": b"x" * 3_000_000}) for _ in range(8)]
    async with Dashboard(redis_url) as dashboard:
        before = await bytes_sent(redis_broker)
        text = ""
        async for event in dashboard.feed.events([], [("large", ids[0])], ""):
            text = event.decode()
            if str(ids[-1]) in text:
                break
        assert str(ids[1]) not in text, "seven would be 21 MB"
        assert '"skipped": 1' in text
        assert await bytes_sent(redis_broker) - before < 15_000_000


async def test_key_of_another_type_is_reported_as_no_stream(redis_broker: Broker, redis_url: str) -> None:
    await redis_broker.set("plain", "a string")
    async with Dashboard(redis_url) as dashboard, client(dashboard) as http:
        page = await http.get("/stream?name=plain")
        assert page.status_code == 404
        assert "WRONGTYPE" in page.text or "not a stream" in page.text


async def test_redis_is_not_queried_without_open_pages(redis_broker: Broker, redis_url: str) -> None:
    async with Dashboard(redis_url, pause_s=0.05) as dashboard, client(dashboard) as http:
        await http.get("/")
        dashboard.stats.stop_after_s = 0.0
        await eventually(lambda: not dashboard.stats.is_reading, what="the end of reading")
        before = await commands(redis_broker)
        await asyncio.sleep(0.3)
        assert await commands(redis_broker) == before + 1  # our own query
        assert (await http.get("/")).status_code == 200
