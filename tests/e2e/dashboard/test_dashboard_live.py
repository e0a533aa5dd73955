"""Open pages: many tabs share a connection, hidden tabs catch up, and outages of the server end."""

from __future__ import annotations

from browsing import Running, in_thread, running, watched_page
from playwright.sync_api import Browser, Page, expect
from starlette.applications import Starlette
from starlette.routing import Mount

from millstream import open_blocking_broker
from millstream.dashboard import Dashboard
from millstream.observe.http import HttpServer
from millstream.testing import RedisProcess, ServedBroker, wait_until


def connections(dashboard: Running) -> int:
    return dashboard.dashboard.feed.connections


def test_eight_tabs_share_one_connection_and_all_are_updated(page: Page, dashboard: Running) -> None:
    dashboard.broker.create_group("orders", "g", start="0")
    tabs = [page, *(page.context.new_page() for _ in range(7))]
    for number, tab in enumerate(tabs):
        tab.goto("/stream?name=orders" if number % 2 else "/stream?name=orders&follow=1")
    for tab in tabs:
        expect(tab.locator("#connection")).to_have_text("live")

    dashboard.broker.xadd_many("orders", [{"n": "1"}] * 41)

    for number, tab in enumerate(tabs):
        expect(tab.locator("#live_facts dd").first).to_have_text("41")
        if not number % 2:
            expect(tab.locator(".entries > li.new")).to_have_count(41)
    assert connections(dashboard) == 1
    for tab in tabs[1:]:
        tab.close()


def test_hidden_tab_disconnects_and_catches_up_when_visible(page: Page, dashboard: Running) -> None:
    dashboard.broker.xadd("orders", {"n": "1"})
    page.goto("/stream?name=orders&follow=1")
    expect(page.locator("#connection")).to_have_text("live")

    turn = """(state) => {
        Object.defineProperty(document, "visibilityState", { value: state, configurable: true });
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    page.evaluate(turn, "hidden")
    expect(page.locator("#connection")).to_have_text("paused")
    wait_until(lambda: connections(dashboard) == 0, what="the connection's end")
    dashboard.broker.xadd_many("orders", [{"n": "2"}] * 4)
    page.evaluate(turn, "visible")

    expect(page.locator("#live_facts dd").first).to_have_text("5")
    expect(page.locator(".entries > li.new")).to_have_count(4)


def test_page_reports_an_outage_of_redis_and_its_end(browser: Browser) -> None:
    with RedisProcess() as server, running(server.url) as dashboard:
        dashboard.broker.xadd("orders", {"n": "1"})
        with watched_page(browser, dashboard.url) as page:
            page.goto("/")
            expect(page.locator("#live_streams tbody tr")).to_have_count(1)
            other = page.context.new_page()
            server.kill()
            expect(page.locator("#banner")).to_be_visible()
            expect(page.locator("#connection")).to_have_text("no answer")
            expect(page.locator("#live_streams tbody tr")).to_have_count(1)  # the last known values
            answer = other.goto("/stream?name=orders")
            assert answer is not None
            assert answer.status == 503
            expect(other.locator("main")).to_contain_text("The server does not answer")

            server.start()
            expect(page.locator("#banner")).to_be_hidden()
            expect(page.locator("#connection")).to_have_text("live")
            expect(page.locator("main")).to_contain_text("There are no streams yet")
            dashboard.broker.xadd("orders", {"n": "2"})
            expect(other.locator("#live_facts dd").first).to_have_text("1")


def test_stream_deleted_while_viewed_is_reported(page: Page, dashboard: Running) -> None:
    dashboard.broker.xadd("orders", {"n": "1"})
    page.goto("/stream?name=orders")
    expect(page.locator("#live_facts dd").first).to_have_text("1")

    dashboard.broker.delete_stream("orders")
    expect(page.locator("#live_facts")).to_contain_text("This stream does not exist")
    dashboard.broker.xadd("orders", {"n": "2"})
    expect(page.locator("#live_facts dd").first).to_have_text("1")


def test_every_page_is_shown_of_a_broker_that_millstream_serves(browser: Browser) -> None:
    with ServedBroker() as server, running(server.url) as dashboard:
        dashboard.broker.create_group("orders", "g", start="0")
        dashboard.broker.xadd_many("orders", [{"n": str(n)} for n in range(3)])
        dashboard.broker.xadd(
            "{orders}.dlq", {"payload": "x", "dlq.original_id": "1-1", "dlq.error_type": "ValueError"}
        )
        with watched_page(browser, dashboard.url) as page:
            page.goto("/")
            row = page.locator("#live_streams tbody tr").filter(has_text="g").first
            expect(row).to_contain_text("orders")
            page.goto("/stream?name=orders&follow=1")
            expect(page.locator("#connection")).to_have_text("live")
            dashboard.broker.xadd("orders", {"n": "new one"})
            expect(page.locator(".entries > li").first).to_contain_text("new one")
            page.goto("/dead-letters")
            expect(page.locator("tbody tr")).to_contain_text("orders")
            for path in ("/pipelines", "/assignments"):
                page.goto(path)
                expect(page.locator("main h1")).to_be_visible()


def test_mounted_dashboard_shows_the_broker_of_its_service(browser: Browser) -> None:
    url = "local://mounted"
    dashboard = Dashboard(url, pause_s=0.2)
    service = Starlette(routes=[Mount("/ops", dashboard)])
    with HttpServer(service, port=0, on_stop=dashboard.feed.end) as web, open_blocking_broker(url) as broker:
        broker.create_group("orders", "g", start="0")
        with watched_page(browser, web.url) as page:
            page.goto("/ops/")
            page.get_by_role("link", name="orders", exact=True).first.click()
            page.get_by_role("link", name="Follow new entries").click()
            expect(page.locator("#connection")).to_have_text("live")
            broker.xadd("orders", {"n": "from the service itself"})
            expect(page.locator(".entries > li.new")).to_contain_text("from the service itself")
            expect(page.locator("#live_groups tbody tr").first).to_contain_text("g")
    in_thread(dashboard.close)


def test_pages_can_be_read_without_scripts(browser: Browser, dashboard: Running) -> None:
    dashboard.broker.xadd_many("orders", [{"n": str(n), "note": "hay"} for n in range(60)])
    dashboard.broker.xadd("orders", {"n": "1", "note": "needle"})
    with watched_page(browser, dashboard.url, java_script_enabled=False) as page:
        orders = page.get_by_role("link", name="orders", exact=True)

        def found() -> bool:
            page.goto("/")  # no update is sent here: the dashboard may not have read the stats since
            return orders.count() == 1

        wait_until(found, what="the stream on the page", timeout_s=60)
        orders.click()
        expect(page.locator(".entries > li")).to_have_count(50)
        page.get_by_role("link", name="Older entries").click()
        expect(page.locator(".entries > li")).to_have_count(11)
        page.get_by_role("link", name="To the newest").click()
        page.get_by_label("Search in fields and payload").fill("needle")
        page.get_by_role("button", name="Show").click()
        expect(page.locator("#found > li")).to_have_count(1)


def test_pages_work_with_keyboard_and_screen_reader(page: Page, dashboard: Running) -> None:
    dashboard.broker.xadd("orders", {"n": "1"})
    page.goto("/stream?name=orders")
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    page.keyboard.press("Enter")
    page.locator(".entries summary").first.focus()
    page.keyboard.press("Enter")
    expect(page.locator(".entries .body").first).to_be_visible()

    for path in ("/", "/stream?name=orders", "/dead-letters", "/pipelines", "/assignments"):
        page.goto(path)
        assert page.locator("h1").count() == 1
        assert page.locator("html").get_attribute("lang") == "en"
        nameless = """[...document.querySelectorAll("a, button, input:not([type=hidden]), select, svg, table")].filter(
            (one) => !(one.getAttribute("aria-label") || one.labels?.length || one.textContent.trim()))
            .map((one) => one.outerHTML)"""
        assert page.evaluate(nameless) == []
    # The focused element keeps the focus while the table around it is rendered again.
    page.goto("/")
    page.get_by_role("link", name="orders", exact=True).focus()
    dashboard.broker.xadd("orders", {"n": "2"})
    expect(page.locator("#live_streams tbody td.n").first).to_have_text("2")
    expect(page.get_by_role("link", name="orders", exact=True)).to_be_focused()
