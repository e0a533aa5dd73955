"""The documentation site: a front page, valid links, and a search that finds public names.

``make docs`` builds the site and runs this module. Without a built site it is skipped.
"""

from __future__ import annotations

import functools
import http.server
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

from millstream.messaging import __all__ as messaging

SITE = Path(__file__).parents[2] / "site"
pytestmark = pytest.mark.skipif(not (SITE / "index.html").exists(), reason="no site was built: run `make docs`")


class Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and name in ("href", "src"):
                self.found.append(value)
            elif value and name == "id":
                self.anchors.add(value)


@functools.cache
def read(page: Path) -> Links:
    links = Links()
    links.feed(page.read_text())
    return links


def test_no_link_is_broken() -> None:
    broken = []
    for page in SITE.rglob("*.html"):
        if page.name == "404.html":  # served at any depth, so its links begin at the site's address
            continue
        for link in read(page).found:
            if "://" in link or link.startswith(("data:", "mailto:")):
                continue
            path, anchor = urldefrag(link)
            target = (page.parent / unquote(path)).resolve() if path else page
            target = target / "index.html" if target.is_dir() else target
            missing = anchor and target.suffix == ".html" and target.exists() and anchor not in read(target).anchors
            if not target.exists() or missing:
                broken.append(f"{page.relative_to(SITE)}: {link}")
    assert not broken


def test_search_finds_public_names() -> None:
    index = json.loads((SITE / "search" / "search_index.json").read_text())
    titles = " ".join(entry["title"] for entry in index["docs"])
    assert [name for name in messaging if name not in titles] == []


@pytest.fixture
def address() -> Iterator[str]:
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()
        thread.join()


def test_browser_shows_the_front_page(address: str, tmp_path: Path) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no browser is installed: run `make setup`")
    words = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    words += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    words += [f"--user-data-dir={tmp_path}", "--virtual-time-budget=5000", "--dump-dom", address]
    output = subprocess.run(words, capture_output=True, text=True, timeout=100, check=True).stdout
    assert "<h1" in output
    assert "billed order 1, delivery 1" in output
    assert "the tutorial" in output
