"""Hostile names and payloads are rendered as text on every page."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import httpx
import pytest
from browsing import Running, in_thread, running, watched_page
from hostile import hostile
from playwright.sync_api import Browser, expect

from millstream import BlockingBroker
from millstream.assignment import Announcement, announce_stream
from millstream.broker import companion_key
from millstream.dashboard.render import MAX_PARAMETER_LENGTH, address, encode_name
from millstream.errors import InvalidArgument
from millstream.testing import RedisProcess
from millstream.wire import Command, to_name

ENTRIES = "entries"


def fill(broker: BlockingBroker) -> None:
    """Each word as a stream with groups and consumers, as a field, a payload, an error, an announced stream."""
    broker.transport.call(Command((b"FLUSHALL",)))
    for word in hostile():
        name = to_name(word)
        broker.xadd(name, {name: name, "payload": name})
        if len(word) < 10_000:
            broker.create_group(name, name, start="0")
            broker.xreadgroup(name, name, name, count=1)
        broker.xadd(ENTRIES, {"uuid": name[:5_000], "payload": word, name: name})
        details = {"stream": name, "original_id": "1-1", "group": name, "error": name, "error_type": name}
        letter = {"payload": word, **{f"dlq.{key}": value for key, value in details.items()}, "dlq.traceback": name}
        broker.xadd("{entries}.dlq", letter)
        try:
            broker.xadd(companion_key(name, "dlq"), letter)
        except InvalidArgument:
            pass  # a name with a brace in it has no companions
        if word.isascii() and len(word) < 10_000:
            announce_stream(broker, "desk", Announcement(name, {name: name}))
    broker.create_group("desk-input", "desk-group", start="0")


@pytest.fixture(scope="module")
def shown(shared_redis: RedisProcess) -> Iterator[Running]:
    with running(shared_redis.url) as dashboard:
        fill(dashboard.broker)
        yield dashboard


class Outline(HTMLParser):
    """The elements of a page and their attributes, without its texts."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[str, tuple[str, ...]]] = set()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.add((tag, tuple(sorted(name for name, _ in attrs))))
        self.addresses += [value or "" for name, value in attrs if name in ("href", "src", "action")]


def outline(html: str) -> Outline:
    made = Outline()
    made.feed(html)
    return made


def pages_of(name: str) -> list[str]:
    words = [("name", encode_name(name))]
    return [address("/stream", words), address("/stream", [*words, ("q", "owned")])]


def test_each_of_two_hundred_names_has_a_page_that_is_built_like_any_other(shown: Running) -> None:
    async def look() -> dict[str, httpx.Response]:
        async with httpx.AsyncClient(base_url=shown.url, timeout=60) as http:
            plain = [*pages_of("plain"), "/", "/?skip=100", "/?skip=200", "/dead-letters", "/assignments?service=desk"]
            named = [to_name(word) for word in hostile() if len(encode_name(to_name(word))) < MAX_PARAMETER_LENGTH]
            paths = [*plain, *(path for name in named for path in pages_of(name))]
            letters = [address("/dead-letters", [("dlq", encode_name(f"{{{name}}}.dlq"))]) for name in named[:60]]
            paths += ["/dead-letters?dlq={entries}.dlq", "/stream?name=entries&order=oldest", *letters]
            return {path: await http.get(path) for path in paths}

    shown.broker.xadd("plain", {"payload": '{"a": 1}', "uuid": "u", "tenant": "acme"})
    shown.broker.create_group("plain", "g", start="0")
    shown.broker.xreadgroup("plain", "g", "c")
    answers: dict[str, Any] = in_thread(look)

    allowed = {tag for path in list(answers)[:7] for tag, _ in outline(answers[path].text).found}
    allowed |= {"ul", "li", "table", "caption", "pre", "details", "summary", "progress", "strong", "svg", "path", "br"}
    for path, answer in answers.items():
        assert answer.status_code in (200, 404), path
        made = outline(answer.text)
        tags = {tag for tag, _ in made.found}
        assert tags <= allowed, path
        assert not {name for _, names in made.found for name in names if name.startswith("on") or name == "style"}, path
        assert all(addresse.startswith(("/", "#")) and not addresse.startswith("//") for addresse in made.addresses), (
            path
        )
        text = answer.text
        assert not [char for char in text if ord(char) < 32 and char not in "\n\t"], path
        assert not {chr(code) for code in (0x202E, 0x2066, 0x2067, 0x200F)} & set(text), path
        assert len(text) < 3_000_000, path


def test_hostile_names_run_no_script_and_keep_the_layout(browser: Browser, shown: Running) -> None:
    word = encode_name("<script>window.owned=1</script>")
    paths = [
        *("/", "/?skip=100", "/?sort=name&skip=200", "/dead-letters", "/dead-letters?dlq={entries}.dlq"),
        *("/stream?name=entries", "/stream?name=entries&order=oldest&follow=1", "/stream?name=entries&q=owned"),
        *(address("/stream", [("name", word)]), "/assignments?service=desk", "/stream?name=millstream.audit"),
        address("/dead-letters", [("dlq", "{" + word + "}.dlq")]),
    ]
    with watched_page(browser, shown.url) as page:
        dialogs: list[str] = []
        asked: list[str] = []
        page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: asked.append(request.url))
        for width in (1280, 390):
            page.set_viewport_size({"width": width, "height": 800})
            for path in paths if width == 1280 else paths[::3]:
                page.goto(path)
                page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
                wide = page.evaluate("document.documentElement.scrollWidth")
                assert wide <= width, f"{path} is {wide} wide"
                assert page.evaluate("typeof window.owned") == "undefined", path
                assert page.title().endswith("millstream"), path
        # Entries that arrive as events are escaped like those of the first response.
        page.goto("/stream?name=entries&follow=1")
        page.wait_for_selector("#connection[data-state=live]")
        for item in hostile()[:40]:
            shown.broker.xadd(ENTRIES, {"payload": item})
        expect(page.locator(".entries > li.new")).to_have_count(40)
        assert page.evaluate("typeof window.owned") == "undefined"
        assert dialogs == []
        assert [url for url in asked if not url.startswith(shown.url)] == []


def test_confirmation_and_dead_letter_are_escaped(shown: Running) -> None:
    letter = shown.broker.xrange("{entries}.dlq", count=1)[0]
    for path in ("/dead-letters/confirm?verb=purge&", "/dead-letter?"):
        answer = httpx.get(f"{shown.url}{path}dlq={{entries}}.dlq&id={letter.id}")
        assert answer.status_code == 200
        assert "<script>window" not in answer.text
