"""The pictures of docs/how-to/dashboard.md, light and dark. MILLSTREAM_PICTURES=1 writes them to docs/images.

Each page is also checked for text that overflows its box and for text with too little contrast.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from browsing import Running, watched_page
from playwright.sync_api import Browser, Page, expect
from sample_shop import fill_shop

IMAGES = Path(__file__).parents[3] / "docs" / "images"
PICTURES = {
    "overview": "/",
    "stream": "/stream?name=shop.orders",
    "dead-letters": "/dead-letters?dlq={shop.orders}.dlq",
    "assignments": "/assignments?service=desk",
}
SHOWN = {("overview", "light"), ("stream", "light"), ("dead-letters", "dark"), ("assignments", "light")}
"""Those of the how-to page."""
PALE = """() => {
  const luminance = (color) => {
    const [r, g, b] = color.match(/[\\d.]+/g).slice(0, 3).map((part) => {
      const share = part / 255;
      return share <= 0.03928 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    for (let one = node; one; one = one.parentElement) {
      const color = getComputedStyle(one).backgroundColor;
      if (!color.endsWith(", 0)") && color !== "transparent") return color;
    }
    return "rgb(255, 255, 255)";
  };
  const pale = [];
  for (const node of document.querySelectorAll("main *, header *, footer *")) {
    const own = [...node.childNodes].some((one) => one.nodeType === 3 && one.textContent.trim());
    if (!own || !node.getClientRects().length) continue;
    const [a, b] = [luminance(getComputedStyle(node).color), luminance(behind(node))];
    if ((Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) < 4.5) pale.push(node.textContent.trim().slice(0, 40));
  }
  return pale;
}"""
OUTSIDE = """() => [...document.querySelectorAll(".card")].filter((card) => {
  const edge = card.getBoundingClientRect().right + 1;
  const parts = [...card.querySelectorAll("*")].filter((one) => !one.closest(".scroll, .unseen, pre, svg"));
  return parts.some((one) => one.getBoundingClientRect().right > edge);
}).map((card) => card.textContent.slice(0, 60))"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_page_is_rendered(browser: Browser, dashboard: Running, tmp_path: Path, scheme: str) -> None:
    fill_shop(dashboard.broker)
    drawn = bool(os.environ.get("MILLSTREAM_PICTURES"))
    with watched_page(browser, dashboard.url, color_scheme=scheme) as page:
        for name, path in PICTURES.items():
            page.goto(path)
            expect(page.locator("#connection")).to_have_text("live")
            if name == "overview":
                expect(page.locator("svg.curve").first).to_be_visible()
                expect(page.locator("#live_attention")).to_contain_text("dead letter")
            assert page.evaluate(PALE) == [], path
            assert page.evaluate(OUTSIDE) == [], path
            picture = (IMAGES if drawn and (name, scheme) in SHOWN else tmp_path) / f"dashboard-{name}-{scheme}.png"
            _draw(page, picture)
            assert picture.stat().st_size > 10_000


def _draw(page: Page, picture: Path) -> None:
    page.screenshot(path=picture, clip={"x": 0, "y": 0, "width": 1280, "height": 800})
