"""Each page in a real browser: with data, without data, and while the data changes."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from browsing import Running, in_thread, running, watched_page
from playwright.sync_api import Browser, Page, expect

from millstream import Message, Publisher, Subscriber, open_broker
from millstream.assignment import Announcement, AssignmentClient, announce_stream, assignments
from millstream.observe.http import HttpServer, application
from millstream.observe.metrics import Exposition
from millstream.observe.pipelines import PipelineRoutes
from millstream.pipelines.checkpoint import BatchRecord
from millstream.pipelines.status import PipelineStatus
from millstream.testing import RedisProcess, eventually, wait_until

ORDERS = "shop.orders"
DLQ = "{shop.orders}.dlq"


def publish(url: str, count: int) -> None:
    async def work() -> None:
        async with open_broker(url) as broker, Publisher(broker) as publisher:
            for number in range(count):
                body = json.dumps({"order": number, "total": 12.10}).encode()
                await publisher.publish(ORDERS, Message(body, {"tenant": "acme"}))

    in_thread(work)


def dead_letter(url: str, count: int) -> None:
    """Publishes orders that fail: the odd ones for one reason, the even ones for another."""
    publish(url, count)

    async def handle(message: Message) -> None:
        number = json.loads(message.payload)["order"]
        raise ValueError(f"order {number} has no customer") if number % 2 else TimeoutError(f"no answer in {number} ms")

    async def work() -> None:
        async with open_broker(url) as broker:
            subscriber = Subscriber(broker, group="billing", group_start="0", max_deliveries=1, consumer="worker-1")
            reading = asyncio.ensure_future(subscriber.consume(ORDERS, handle))

            async def all_dead_lettered() -> bool:
                return await broker.xlen(DLQ) == count

            await eventually(all_dead_lettered, what="the dead letters")
            await subscriber.close()
            await asyncio.gather(reading, return_exceptions=True)

    in_thread(work)


EMPTY = {
    "/": "There are no streams yet",
    "/stream?name=orders": "This stream does not exist",
    "/dead-letters": "There are no dead letters",
    "/dead-letters?dlq=%7Borders%7D.dlq": "No dead letters here",
    "/dead-letter?dlq=%7Borders%7D.dlq&id=1-1": "has no entry 1-1",
    "/pipelines": "No pipelines are configured",
    "/assignments": "No service has announced a stream",
}


def test_empty_page_says_so(page: Page) -> None:
    for address, words in EMPTY.items():
        page.goto(address)
        expect(page.locator("main")).to_contain_text(words)


def test_streams_that_need_attention_come_first_with_a_reason(page: Page, dashboard: Running) -> None:
    dashboard.broker.xadd_many("calm", [{"n": "1"}] * 3)
    dashboard.broker.xadd_many("busy", [{"n": "1"}] * 50)
    dashboard.broker.create_group("busy", "readers", start="0")

    page.goto("/")

    rows = page.locator("#live_streams tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.nth(0)).to_contain_text("busy")
    expect(rows.nth(0)).to_contain_text("50")
    expect(rows.nth(0).locator("td").last).to_have_text("readers")
    page.goto("/?sort=name")
    expect(rows.nth(1)).to_contain_text("calm")
    page.get_by_label("Name contains").fill("cal")
    page.get_by_role("button", name="Show").click()
    expect(rows).to_have_count(1)
    page.goto("/stream?name=busy")
    expect(page.locator("#live_findings")).to_contain_text("no consumer (lag 50)")


def test_lag_rises_and_falls_while_a_consumer_stops_and_starts(page: Page, dashboard: Running) -> None:
    broker = dashboard.broker
    broker.create_group("orders", "g", start="0")
    page.goto("/stream?name=orders")
    lag = page.locator("#live_groups tbody tr").first.locator("td").nth(1)
    expect(lag).to_have_text("0", use_inner_text=True)

    broker.xadd_many("orders", [{"n": "1"}] * 7)
    expect(lag).to_have_text("7", use_inner_text=True)
    expect(lag.get_by_role("img", name="lag: from 0 to 7")).to_be_visible()

    taken = broker.xreadgroup("orders", "g", "worker-1", count=7)
    expect(lag).to_have_text("0", use_inner_text=True)
    expect(page.locator("#live_groups")).to_contain_text("worker-1")
    broker.xack("orders", "g", [item.id for item in taken])
    expect(page.locator("#live_groups")).to_contain_text("Trimming waits for no group")
    expect(page.locator("#connection")).to_have_text("live")


def test_entries_are_shown_from_either_end_and_from_an_id_or_a_time(page: Page, dashboard: Running) -> None:
    ids = [dashboard.broker.xadd("numbers", {"n": str(n)}, id=f"{1767225600000 + n * 1000}-0") for n in range(120)]

    page.goto("/stream?name=numbers")
    entries = page.locator(".entries > li")
    expect(entries).to_have_count(50)
    expect(entries.first).to_contain_text(str(ids[-1]))
    page.get_by_role("link", name="Older entries").click()
    expect(entries.first).to_contain_text(str(ids[-51]))
    page.get_by_role("link", name="Older entries").click()
    expect(entries).to_have_count(20)
    expect(page.get_by_role("link", name="Older entries")).to_have_count(0)

    page.get_by_label("Order").select_option("oldest")
    page.get_by_label("From an id or a time").fill("2026-01-01 00:01:30")
    page.get_by_role("button", name="Show").click()
    expect(entries.first).to_contain_text(str(ids[90]))
    page.get_by_label("From an id or a time").fill("yesterday")
    page.get_by_role("button", name="Show").click()
    expect(page.locator(".banner:visible")).to_contain_text("an id such as")


def test_payloads_are_shown_as_json_text_or_bytes_by_the_codec_that_fits(page: Page, dashboard: Running) -> None:
    publish(dashboard.redis_url, 1)
    dashboard.broker.xadd(ORDERS, {"data": b"\x00\xff\x10\x80" * 8})
    dashboard.broker.xadd(ORDERS, {"body": "plain words", "source": "benthos"})

    page.goto(f"/stream?name={ORDERS}&order=oldest")
    bodies = page.locator(".entries .body")
    for summary in page.locator(".entries summary").filter(has=page.locator(".preview")).all():
        summary.click()
    expect(bodies.nth(0).locator("pre")).to_have_text('{\n  "order": 0,\n  "total": 12.1\n}')
    expect(bodies.nth(0)).to_contain_text("read as flat")
    expect(bodies.nth(0)).to_contain_text("tenant")
    expect(bodies.nth(1).locator("pre")).to_contain_text("00000000  00 ff 10 80")
    expect(bodies.nth(2).locator("pre")).to_have_text("plain words")
    expect(bodies.nth(2)).to_contain_text("benthos")


def test_search_continues_in_slices_and_can_be_cancelled(page: Page, dashboard: Running) -> None:
    entries = [{"n": str(n), "note": "Needle" if n == 3 else "hay"} for n in range(12_000)]
    dashboard.broker.xadd_many("haystack", entries)

    page.goto("/stream?name=haystack&q=needle")
    expect(page.locator("#search-status")).to_contain_text("searched all: 1 found in 12,000 of about 12,000 entries")
    expect(page.locator("#found > li")).to_have_count(1)
    expect(page.locator("#found")).to_contain_text("Needle")

    answers: list[str] = []
    page.route("**/stream/search*", lambda route: answers.append(route.request.url))  # never answered
    page.goto("/stream?name=haystack&q=needle")
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("#search-status")).to_contain_text("cancelled: 0 found in 5,000")
    assert len(answers) == 1


def test_live_tail_shows_new_entries_and_can_be_paused(page: Page, dashboard: Running) -> None:
    dashboard.broker.xadd("news", {"title": "old"})
    page.goto("/stream?name=news&follow=1")
    expect(page.locator("#connection")).to_have_text("live")
    entries = page.locator(".entries > li")

    dashboard.broker.xadd("news", {"title": "first"})
    expect(entries.first).to_contain_text("first")
    page.get_by_role("button", name="Pause").click()
    dashboard.broker.xadd("news", {"title": "second"})
    expect(page.locator("#tail-status")).to_have_text("paused, 1 waiting")
    expect(entries.first).to_contain_text("first")
    page.get_by_role("button", name="Resume").click()
    expect(entries.first).to_contain_text("second")
    expect(entries).to_have_count(3)


def test_dead_letter_is_replayed_by_clicking(page: Page, dashboard: Running) -> None:
    dead_letter(dashboard.redis_url, 6)
    broker = dashboard.broker
    before = broker.xlen(ORDERS)

    page.goto("/dead-letters")
    page.get_by_role("link", name=ORDERS).click()
    expect(page.locator("#live_errors tbody tr")).to_have_count(2)
    expect(page.locator("#live_errors")).to_contain_text("order # has no customer")
    page.locator("td.id a").first.click()
    expect(page.locator("main")).to_contain_text("Traceback (most recent call last)")
    expect(page.locator("main")).to_contain_text("ValueError")
    page.get_by_role("link", name="Replay").click()
    expect(page.locator("main")).to_contain_text("Replay 1 dead letter?")
    expect(page.locator("main")).to_contain_text(f"to {ORDERS}")
    assert broker.xlen(DLQ) == 6  # so far it was only confirmed
    page.get_by_role("button", name="Replay 1").click()
    expect(page.locator("main")).to_contain_text("1 dead letter was replayed.")

    assert broker.xlen(DLQ) == 5
    assert broker.xlen(ORDERS) == before + 1
    assert broker.xrevrange(ORDERS, count=1)[0].fields[b"replay.group"] == b"billing"
    notes = [entry.fields for entry in broker.xrange("millstream.audit")]
    assert [note[b"state"] for note in notes] == [b"begun", b"done"]
    assert notes[1][b"who"] == b"local (127.0.0.1)"
    assert notes[1][b"what"].startswith(b"replay dead letters of {shop.orders}.dlq")


def test_all_dead_letters_of_one_error_are_purged_and_no_others(page: Page, dashboard: Running) -> None:
    dead_letter(dashboard.redis_url, 6)
    page.goto("/dead-letters?dlq=%7Bshop.orders%7D.dlq")
    group = page.locator("#live_errors tbody tr").filter(has_text="TimeoutError")
    group.get_by_role("link", name="Purge").click()
    expect(page.locator("main")).to_contain_text("Delete 3 dead letters of shop.orders permanently?")
    # Messages that are dead-lettered after the confirmation page was shown are not deleted.
    late = {"dlq.original_id": "1-1", "dlq.error_type": "TimeoutError", "dlq.error": "no answer in 9 ms"}
    dashboard.broker.xadd(DLQ, late)
    page.get_by_role("button", name="Purge 3").click()
    expect(page.locator("main")).to_contain_text("3 dead letters were purged.")

    remaining = [entry.fields[b"dlq.error_type"] for entry in dashboard.broker.xrange(DLQ)]
    assert remaining == [b"ValueError"] * 3 + [b"TimeoutError"]


def test_selected_dead_letters_are_replayed(page: Page, dashboard: Running) -> None:
    dead_letter(dashboard.redis_url, 4)
    page.goto("/dead-letters?dlq=%7Bshop.orders%7D.dlq")
    page.locator("tbody input[name=id]").nth(0).check()
    page.locator("tbody input[name=id]").nth(2).check()
    page.get_by_role("button", name="Replay selected").click()
    expect(page.locator("main")).to_contain_text("Replay 2 dead letters?")
    page.get_by_role("button", name="Replay 2").click()
    expect(page.locator("main")).to_contain_text("2 dead letters were replayed.")
    assert dashboard.broker.xlen(DLQ) == 2


@contextmanager
def member(url: str, name: str) -> Iterator[None]:
    """A member of the service ``desk``, running on a thread of its own."""
    leaving = threading.Event()

    async def work() -> None:
        async with open_broker(url) as broker:
            client = AssignmentClient(broker, "desk", member=name)

            async def listen() -> None:
                async for _ in client.start():
                    pass

            listening = asyncio.ensure_future(listen())
            await asyncio.to_thread(leaving.wait)
            await client.close()
            await listening

    thread = threading.Thread(target=lambda: asyncio.run(work()))
    thread.start()
    yield
    leaving.set()
    thread.join()


def test_owners_are_shown_and_a_release_changes_the_token(page: Page, dashboard: Running) -> None:
    announce_stream(dashboard.broker, "desk", Announcement("session-1"))
    with member(dashboard.redis_url, "member-a"):
        wait_until(lambda: assignments(dashboard.broker, "desk")[0].owner, what="an owner")
        page.goto("/assignments?service=desk")
        row = page.locator("tbody tr").filter(has=page.get_by_role("link", name="session-1"))
        expect(row).to_contain_text("member-a")
        token = assignments(dashboard.broker, "desk")[0].token
        expect(row).to_contain_text(str(token))

        row.get_by_role("link", name="Release").click()
        expect(page.locator("main")).to_contain_text("Release session-1 from its owner")
        page.get_by_role("button", name="Release").click()
        expect(page.locator("main")).to_contain_text("session-1 was released from member-a.")
        wait_until(lambda: assignments(dashboard.broker, "desk")[0].token > token, what="the next lease")
        page.goto("/assignments?service=desk")
        expect(page.locator("#live_assignments svg.timeline circle")).not_to_have_count(0)
        expect(page.locator("#live_assignments")).to_contain_text("Changes of owner")


def test_pipeline_is_paused_and_resumed_in_its_process(browser: Browser, shared_redis: RedisProcess) -> None:
    runner = FakeRunner()
    routes = PipelineRoutes(runner)  # type: ignore[arg-type]  # what it answers is all that matters here
    web = application(Exposition(), health=routes.health, ready=routes.ready, routes=routes.routes())
    with (
        HttpServer(web, port=0) as pipelines,
        running(shared_redis.url, pipelines=[pipelines.url]) as dashboard,
        watched_page(browser, dashboard.url) as page,
    ):
        page.goto("/pipelines")
        card = page.get_by_role("region", name="Pipeline orders")
        expect(card.locator("h2 .badge")).to_have_text("running")
        expect(card).to_contain_text("1,250")
        expect(card.locator("svg.bars rect")).to_have_count(3)
        for verb, state in (("Pause", "paused"), ("Resume", "running"), ("Stop", "stopped"), ("Start", "running")):
            card.get_by_role("link", name=verb).click()
            expect(page.locator("main")).to_contain_text(f"{verb} the pipeline orders?")
            page.get_by_role("button", name=verb).click()
            expect(page.locator("main")).to_contain_text(f"Pipeline orders is {state} now.")
            page.get_by_role("link", name="Back").click()
            expect(card.locator("h2 .badge")).to_have_text(state)
        assert runner.actions == ["pause", "resume", "stop", "start"]

        pipelines.stop()
        expect(page.locator("main")).to_contain_text("does not answer")


class FakeRunner:
    """Answers as the runner of pipelines does. A real one takes Spark eight seconds to start."""

    def __init__(self) -> None:
        self.actions: list[str] = []
        self.state = "running"
        self.checkpoint = self
        self.plan = self
        self.dead_letters = None

    def statuses(self) -> list[PipelineStatus]:
        return [self.status()]

    def named(self, name: str) -> FakeRunner:
        return self

    def status(self) -> PipelineStatus:
        progress = {"rows": 5_000, "processed_rows_per_second": 1_250.0, "lag": 12, "batch_ms": 400}
        known: Any = {
            "in_flight": None,
            "checkpoint": "/c",
            "source": "ok",
            "sinks": {"redis": "ok", "kafka": "failing"},
        }
        return PipelineStatus("orders", "acme", self.state, None, 3, **known, waiting={"kafka": 2}, progress=progress)  # type: ignore[arg-type]

    def batches(self, last: int = 20) -> list[BatchRecord]:
        return [BatchRecord(n, 1767225600000 + n * 1000, 1767225600400 + n * 1000, ()) for n in range(3)]

    def _become(self, verb: str, state: str) -> None:
        self.actions.append(verb)
        self.state = state

    def pause(self) -> None:
        self._become("pause", "paused")

    def resume(self) -> None:
        self._become("resume", "running")

    def stop(self) -> None:
        self._become("stop", "stopped")

    def start(self) -> None:
        self._become("start", "running")


def test_dead_letters_can_be_used_on_a_narrow_screen(page: Page, dashboard: Running) -> None:
    dead_letter(dashboard.redis_url, 60)
    page.set_viewport_size({"width": 390, "height": 800})
    page.goto(f"/dead-letters?dlq={DLQ}")
    expect(page.get_by_role("link", name="Replay").first).to_be_in_viewport(ratio=1)
    height = page.evaluate("document.documentElement.scrollHeight")
    assert height < 60 * 110, f"{height} px for 60 dead letters"
    page.evaluate("window.scrollTo(0, document.documentElement.scrollHeight / 2)")
    expect(page.get_by_role("button", name="Replay selected")).to_be_in_viewport()


def test_long_errors_do_not_lengthen_the_dead_letters_on_a_narrow_screen(page: Page, dashboard: Running) -> None:
    for number in range(30):
        text = f"order {number} cannot be paid: " + "x" * 400
        fields = {"payload": "1", "dlq.error_type": "ValueError", "dlq.error": text, "dlq.group": "billing"}
        dashboard.broker.xadd(DLQ, {**fields, "dlq.original_stream": ORDERS, "dlq.original_id": f"1-{number}"})
    page.set_viewport_size({"width": 390, "height": 800})
    page.goto(f"/dead-letters?dlq={DLQ}")
    expect(page.get_by_role("link", name="Replay").first).to_be_in_viewport(ratio=1)
    height = page.evaluate("document.documentElement.scrollHeight")
    assert height < 30 * 110 + 800, f"{height} px for 30 dead letters"
    edges = page.evaluate(
        """() => ["td.actions", ".scroll"].map((one) => document.querySelector(one).getBoundingClientRect().right)"""
    )
    assert abs(edges[0] - edges[1]) < 2, "no text shows beside the buttons"
