"""Live updates during user interaction: nothing moves between pointer down and up, and focus and selection are kept."""

from __future__ import annotations

import pytest
from browsing import Running
from playwright.sync_api import Locator, Page, expect

from millstream.testing import wait_until

ARRIVED = """([id, text]) => {
    const part = document.getElementById(id);
    return (part.newHtml ?? part.innerHTML).includes(text);
}"""
"""An update of a part has arrived, whether it is shown already or waits for the end of an interaction."""


def point_at(page: Page, target: Locator) -> None:
    target.scroll_into_view_if_needed()
    box = target.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)


def press(page: Page, target: Locator) -> None:
    """Presses the pointer on the target. Repeats if an update moved the target between locating and pressing."""
    for _ in range(10):
        point_at(page, target)
        page.mouse.down()
        if target.evaluate("(element) => element.matches(':active')"):
            return
        page.mouse.move(0, 0)
        page.mouse.up()  # released elsewhere: nothing was clicked
    raise AssertionError("it moved between every press and release")


def test_click_hits_its_target_during_live_updates(page: Page, dashboard: Running) -> None:
    dashboard.broker.xadd_many("orders", [{"n": str(n)} for n in range(3)])
    page.goto("/stream?name=orders")
    expect(page.locator("#connection")).to_have_text("live")
    page.get_by_label("From an id or a time").focus()  # it loses the focus now, which must not move anything either
    press(page, page.get_by_role("button", name="Show"))

    # A dozen rows above the button, and its own card moves down.
    for number in range(12):
        dashboard.broker.create_group("orders", f"reader-{number}", start="0")
    page.wait_for_function(ARRIVED, arg=["live_groups", "reader-11"], timeout=60_000)
    arrived = page.evaluate("performance.now()")
    page.wait_for_function("(at) => performance.now() > at + 1100", arg=arrived)  # longer than a click takes
    expect(page.locator("#live_groups")).not_to_contain_text("reader-11")
    page.mouse.up()

    page.wait_for_url("**order=newest*")  # the form was sent
    expect(page.locator("#live_groups")).to_contain_text("reader-11")


def test_row_keeps_node_focus_and_position_while_the_order_changes(page: Page, dashboard: Running) -> None:
    for name in ("calm", "later"):
        dashboard.broker.create_group(name, "g", start="0")
    dashboard.broker.xadd("calm", {"n": "1"})
    page.goto("/")
    rows = page.locator("#live_streams tbody tr")
    expect(rows.first).to_contain_text("calm")
    calm = rows.get_by_role("link", name="calm", exact=True)
    calm.focus()
    calm.evaluate("(link) => { window.held = link; }")
    press(page, calm)

    dashboard.broker.xadd_many("later", [{"n": "1"}] * 9)
    page.wait_for_function(ARRIVED, arg=["live_streams", ">9<"], timeout=60_000)
    assert rows.first.get_by_role("link").first.inner_text() == "calm"  # nothing has moved under the pointer
    page.mouse.move(2, 2)
    page.mouse.up()  # released elsewhere: nothing was clicked

    expect(rows.first).to_contain_text("later")
    expect(calm).to_be_focused()
    assert page.evaluate("document.activeElement === window.held"), "the row was moved and not created again"


def test_entry_can_be_opened_while_new_ones_arrive(page: Page, dashboard: Running) -> None:
    dashboard.broker.xadd("news", {"title": "the one that is meant"})
    page.goto("/stream?name=news&follow=1")
    expect(page.locator("#connection")).to_have_text("live")
    meant = page.locator(".entries > li").filter(has_text="the one that is meant")
    press(page, meant.locator("summary").first)
    last = dashboard.broker.xadd_many("news", [{"title": "new"}] * 5)[-1]
    page.wait_for_selector(f'[data-after="{last}"], .entries > li:nth-child(6)', state="attached")
    page.mouse.up()

    expect(meant.locator(".body")).to_be_visible()
    expect(page.locator(".entries > li.new")).to_have_count(5)


@pytest.mark.parametrize("address", ["/", "/stream?name=orders"])
def test_selection_and_unfolded_rows_survive_updates(page: Page, dashboard: Running, address: str) -> None:
    dashboard.broker.create_group("orders", "g", start="0")
    page.goto(address)
    number = page.locator("td.n").first
    expect(number).to_be_visible()
    before = dashboard.dashboard.stats.version
    page.evaluate("""() => {
        const name = [...document.querySelectorAll("td.name")][0];
        getSelection().selectAllChildren(name);
    }""")
    selected = page.evaluate("getSelection().toString()")
    dashboard.broker.xadd_many("orders", [{"n": "1"}] * 3)
    wait_until(lambda: dashboard.dashboard.stats.version > before + 2, what="two more looks")
    assert page.evaluate("getSelection().toString()") == selected != ""
    page.evaluate("getSelection().removeAllRanges()")
    expect(page.locator("main")).to_contain_text("3")
