"""Access control of the dashboard over HTTP, without a browser."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from millstream import Broker, open_broker
from millstream.dashboard import Dashboard
from millstream.dashboard.entries import read_page
from millstream.dashboard.feed import Feed, Tails
from millstream.errors import InvalidArgument
from millstream.model import EntryId
from millstream.testing import eventually

HERE = "http://127.0.0.1:8090"
TOKEN = "s3cret-token"
BURIED = {"payload": "x", "dlq.original_id": "1-1", "dlq.stream": "orders", "dlq.group": "g", "dlq.error_type": "E"}
FORM = {"content-type": "application/x-www-form-urlencoded", "origin": HERE}


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    async with open_broker("local://dashboard-http") as broker:
        yield broker


def client(dashboard: Dashboard, **headers: str) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=dashboard)
    return httpx.AsyncClient(transport=transport, base_url=HERE, headers={"accept": "text/html", **headers})


def dashboard(**options: Any) -> Dashboard:
    return Dashboard("local://dashboard-http", **options)


def csrf_in(html: str) -> str:
    match = re.search(r'name="csrf" value="([^"]+)"', html)
    assert match is not None
    return match[1]


async def test_every_answer_carries_a_policy_that_runs_nothing_foreign(broker: Broker) -> None:
    async with dashboard() as app, client(app) as http:
        for path in ("/", "/nowhere", "/static/live.js", "/static/../app.py", "/dead-letters/confirm"):
            answer = await http.get(path)
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        assert (await http.get("/nowhere")).status_code == 404
        assert (await http.get("/static/../app.py")).status_code == 404


async def test_no_page_has_a_script_or_a_style_of_its_own(broker: Broker) -> None:
    await broker.xadd("orders", {"payload": "{}"})
    async with dashboard() as app, client(app) as http:
        for path in ("/", "/stream?name=orders", "/dead-letters", "/pipelines", "/assignments", "/nowhere"):
            html = (await http.get(path)).text
            assert re.findall(r"<script(?! type=\"module\" src=\"/static/live.js\"></script>)", html) == []
            assert re.findall(r"\s(?:on\w+|style)=", html) == []
            assert "http://" not in html.replace("http://127.0.0.1:9000", "")
            assert "https://" not in html


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "attacker.example"},
        {"host": "attacker.example:8090"},
        {"host": ""},
        {"host": "10.0.0.5:8090"},
        {"origin": "http://attacker.example"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"},
        {"sec-fetch-site": "same-site", "sec-fetch-mode": "cors", "sec-fetch-dest": "empty"},
    ],
)
async def test_foreign_origin_or_host_is_rejected(broker: Broker, headers: dict[str, str]) -> None:
    async with dashboard() as app, client(app, **headers) as http:
        answer = await http.get("/")
        assert answer.status_code == 403
        assert "set-cookie" not in answer.headers
        assert "<html" not in answer.text


async def test_link_from_another_site_opens_the_dashboard(broker: Broker) -> None:
    followed = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    async with dashboard() as app, client(app, **followed) as http:
        assert (await http.get("/")).status_code == 200
        assert (await http.post("/dead-letters/confirm")).status_code == 403


async def test_action_requires_the_form_of_this_session(broker: Broker) -> None:
    letter = await broker.xadd("{orders}.dlq", BURIED)
    ask = f"/dead-letters/confirm?dlq=%7Borders%7D.dlq&verb=purge&id={letter}"
    async with dashboard() as app, client(app) as http, client(app) as other:
        csrf = csrf_in((await http.get(ask)).text)
        form = {"dlq": "{orders}.dlq", "verb": "purge", "id": str(letter)}
        theirs = csrf_in((await other.get(ask)).text)
        refused = [
            await http.post("/dead-letters/confirm", data=form, headers=FORM),
            await http.post("/dead-letters/confirm", data={**form, "csrf": theirs}, headers=FORM),
            await http.post("/dead-letters/confirm", data={**form, "csrf": csrf}),
            await http.post(
                "/dead-letters/confirm", data={**form, "csrf": csrf}, headers={"origin": "http://evil.example"}
            ),
            await httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url=HERE).post(
                "/dead-letters/confirm", data={**form, "csrf": csrf}, headers=FORM
            ),
        ]
        assert [answer.status_code for answer in refused] == [403] * 5
        assert await broker.xlen("{orders}.dlq") == 1
        assert await broker.xlen("millstream.audit") == 0

        done = await http.post("/dead-letters/confirm", data={**form, "csrf": csrf}, headers=FORM)
        assert done.status_code == 303
        assert "1 dead letter was purged" in (await http.get(done.headers["location"])).text
        assert await broker.xlen("{orders}.dlq") == 0
    await broker.delete_stream("millstream.audit")


async def test_cookie_is_hidden_from_scripts_and_other_sites(broker: Broker) -> None:
    async with dashboard() as app, client(app) as http:
        cookie = (await http.get("/")).headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Lax" in cookie
        assert "Path=/" in cookie
        assert "set-cookie" not in (await http.get("/")).headers, "it is kept"


async def test_with_a_token_nothing_is_served_before_login(broker: Broker) -> None:
    await broker.xadd("very-secret-stream", {"a": "b"})
    async with dashboard(token=TOKEN) as app, client(app) as http:
        for path in ("/", "/stream?name=very-secret-stream", "/dead-letters", "/done?id=1-1"):
            answer = await http.get(path)
            assert (answer.status_code, answer.headers["location"].partition("?")[0]) == (303, "/login")
            assert "very-secret" not in answer.text
        for path in ("/live?page=/", "/stream/search?name=very-secret-stream&q=b"):
            assert (await http.get(path, headers={"accept": "application/json"})).status_code == 401
        bearer = await http.get("/", headers={"authorization": f"Bearer {TOKEN}"})
        assert "very-secret-stream" in bearer.text
    await broker.delete_stream("very-secret-stream")


async def test_login_with_the_token_and_logout(broker: Broker) -> None:
    async with dashboard(token=TOKEN) as app, client(app) as http:
        page = await http.get("/login?next=/dead-letters")
        form = {"csrf": csrf_in(page.text), "name": "ana", "next": "/dead-letters"}
        wrong = await http.post("/login", data={**form, "token": "guess"}, headers=FORM)
        assert (wrong.status_code, "The token is wrong" in wrong.text) == (401, True)
        right = await http.post("/login", data={**form, "token": TOKEN}, headers=FORM)
        assert (right.status_code, right.headers["location"]) == (303, "/dead-letters")
        assert TOKEN not in right.headers["set-cookie"]
        inside = await http.get("/")
        assert inside.status_code == 200
        await http.post("/logout", data={"csrf": csrf_in(inside.text)}, headers=FORM)
        assert (await http.get("/")).status_code == 303


@pytest.mark.parametrize("where", ["//evil.example", "https://evil.example", "/\\evil.example", "javascript:alert(1)"])
async def test_login_does_not_redirect_to_another_site(broker: Broker, where: str) -> None:
    async with dashboard(token=TOKEN) as app, client(app) as http:
        page = await http.get("/login", params={"next": where})
        form = {"csrf": csrf_in(page.text), "next": where, "token": TOKEN}
        assert (await http.post("/login", data=form, headers=FORM)).headers["location"] == "/"


async def test_wrong_tokens_throttle_all_logins(broker: Broker) -> None:
    async with dashboard(token=TOKEN) as app, client(app) as http:
        form = {"csrf": csrf_in((await http.get("/login")).text), "token": "guess"}
        tried = [(await http.post("/login", data=form, headers=FORM)).status_code for _ in range(12)]
        assert tried == [401] * 10 + [429] * 2


async def test_read_only_dashboard_refuses_actions(broker: Broker) -> None:
    letter = await broker.xadd("{orders}.dlq", BURIED)
    async with dashboard(read_only=True) as app, client(app) as http:
        listed = (await http.get("/dead-letters?dlq=%7Borders%7D.dlq")).text
        assert str(letter) in listed
        assert "Purge" not in listed
        asked = await http.get(f"/dead-letters/confirm?dlq=%7Borders%7D.dlq&verb=purge&id={letter}")
        done = await http.post("/dead-letters/confirm", data={"dlq": "{orders}.dlq", "verb": "purge"}, headers=FORM)
        assert (asked.status_code, done.status_code) == (403, 403)
        assert await broker.xlen("{orders}.dlq") == 1
    await broker.delete_stream("{orders}.dlq")


def test_off_loopback_a_token_is_required_and_read_only_is_the_default() -> None:
    with pytest.raises(InvalidArgument, match="token"):
        Dashboard("redis://127.0.0.1:1", host="0.0.0.0")
    assert Dashboard("redis://127.0.0.1:1", host="0.0.0.0", token=TOKEN).read_only
    assert not Dashboard("redis://127.0.0.1:1", host="0.0.0.0", token=TOKEN, read_only=False).read_only
    assert not Dashboard("redis://127.0.0.1:1", host="::1").read_only


async def test_off_loopback_only_ip_addresses_and_configured_names_are_served(broker: Broker) -> None:
    app = dashboard(host="0.0.0.0", token=TOKEN, names=["streams.example"])
    async with app, client(app, authorization=f"Bearer {TOKEN}") as http:
        for host, status in (("10.0.0.5:8090", 200), ("streams.example", 200), ("evil.example", 403)):
            assert (await http.get("/", headers={"host": host})).status_code == status


async def test_secrets_of_urls_are_never_shown() -> None:
    app = Dashboard("redis://:hunter2@127.0.0.1:1/0", pause_s=60)
    async with app, client(app) as http:
        for path in ("/", "/stream?name=orders", "/dead-letters?dlq=x"):
            answer = await http.get(path)
            assert "hunter2" not in answer.text
        assert "redis://***@127.0.0.1:1/0" in answer.text
        assert answer.status_code == 503


async def test_action_that_cannot_be_audited_is_not_executed(broker: Broker) -> None:
    letter = await broker.xadd("{orders}.dlq", BURIED)
    await broker.set("millstream.audit", "in the way")
    async with dashboard() as app, client(app) as http:
        page = await http.get(f"/dead-letters/confirm?dlq=%7Borders%7D.dlq&verb=purge&id={letter}")
        form = {"csrf": csrf_in(page.text), "dlq": "{orders}.dlq", "verb": "purge", "id": str(letter)}
        assert (await http.post("/dead-letters/confirm", data=form, headers=FORM)).status_code == 502
        assert await broker.xlen("{orders}.dlq") == 1
    await broker.delete("millstream.audit", "{orders}.dlq")


async def test_too_large_form_is_refused(broker: Broker) -> None:
    async with dashboard() as app, client(app) as http:
        answer = await http.post("/dead-letters/confirm", content=b"a=" + b"x" * 200_000, headers=FORM)
        assert answer.status_code == 413


async def test_dashboard_can_be_mounted_in_an_application(broker: Broker) -> None:
    from starlette.applications import Starlette
    from starlette.routing import Mount

    await broker.xadd("orders", {"a": "b"})
    async with dashboard() as text:
        app = Starlette(routes=[Mount("/ops/streams", text)])
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url=HERE) as http:
            page = await http.get("/ops/streams/")
            assert 'href="/ops/streams/stream?name=orders"' in page.text
            assert 'src="/ops/streams/static/live.js"' in page.text
            assert "Path=/ops/streams" in page.headers["set-cookie"]
            assert (await http.get("/ops/streams/static/live.js")).status_code == 200
            assert (await http.get("/ops/streams/stream?name=orders")).status_code == 200


@pytest.mark.parametrize("foreign_cookie", ['prefs={"a": 1, "b": [2]}', 'name="x', "some name=a b", "\u00e9=1", ";;="])
async def test_cookies_of_other_programs_do_not_prevent_login(broker: Broker, foreign_cookie: str) -> None:
    async with dashboard(token=TOKEN) as app, client(app) as http:
        page = await http.get("/login")
        own = page.headers["set-cookie"].partition(";")[0]
        http.cookies.clear()
        both = {**FORM, "cookie": f"{foreign_cookie}; {own}; {foreign_cookie}".encode("latin-1")}
        form = {"csrf": csrf_in(page.text), "token": TOKEN, "name": "a"}
        answer = await http.post("/login", data=form, headers=both)
        assert answer.status_code == 303
        both["cookie"] = f"{foreign_cookie}; {answer.headers['set-cookie'].partition(';')[0]}".encode("latin-1")
        http.cookies.clear()
        assert (await http.get("/", headers=both)).status_code == 200


async def test_wrong_tokens_in_the_header_are_throttled(broker: Broker) -> None:
    async with dashboard(token=TOKEN) as app, client(app) as http:
        answers = [await http.get("/", headers={"authorization": f"Bearer {n}"}) for n in range(11)]
        assert [answer.status_code for answer in answers[:10]] == [303] * 10
        assert answers[10].status_code == 429
        assert (await http.get("/", headers={"authorization": f"Bearer {TOKEN}"})).status_code == 429


async def test_unexpected_error_in_the_stream_stats_is_shown(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: object) -> None:
        raise KeyError("group")

    async with dashboard() as app, client(app) as http:
        monkeypatch.setattr(app.stats, "_read", fail)
        async with asyncio.timeout(30):
            await http.get("/")
        assert app.stats.away is not None
        assert "KeyError" in app.stats.away
        assert "KeyError" in caplog.text


async def test_findings_show_their_time(broker: Broker) -> None:
    await broker.xadd("{orders}.dlq", {"a": "1"})
    await broker.xadd("orders", {"a": "1"})
    async with dashboard() as app, client(app) as http:
        await http.get("/")
        await eventually(lambda: bool(app.stats.findings), what="the stream is examined")
        page = (await http.get("/")).text
    assert re.search(r"As of \d\d:\d\d:\d\d", page)


async def test_unexpected_error_of_one_page_does_not_end_the_connection_of_all_pages(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    async def parts(page: str, root: str) -> dict[str, str]:
        if page == "/bad":
            raise KeyError("group")
        return {"rows": "fine"}

    async with dashboard() as app:
        tails = Tails(broker, lambda entry: str(entry.id))
        events = Feed(app.stats, tails, parts).events(["/bad", "/good"], [], "")
        async with asyncio.timeout(30):
            received = [await anext(events) for _ in range(3)]
        await events.aclose()  # type: ignore[attr-defined]  # it is a generator
    assert b'"address": "/bad", "parts": {}, "reload": false' in received[1]
    assert b"fine" in received[2]
    assert "KeyError" in caplog.text


async def test_reader_ends_when_the_last_leave_overlaps_a_join(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    await broker.xadd("orders", {"a": "1"})
    tails = Tails(broker, lambda entry: str(entry.id))
    arrived = asyncio.Event()
    first = await tails.follow("orders", EntryId(0, 0), arrived)
    assert first is not None
    started, may_end = asyncio.Event(), asyncio.Event()

    async def slow_page(*args: Any, **options: Any) -> Any:
        started.set()
        await may_end.wait()
        return await read_page(*args, **options)

    monkeypatch.setattr("millstream.dashboard.feed.read_page", slow_page)
    joining = asyncio.create_task(tails.follow("orders", EntryId(0, 0), arrived))
    await started.wait()
    tails.leave("orders", first)
    may_end.set()
    second = await joining
    assert second is not None
    tails.leave("orders", second)
    assert [task for task in asyncio.all_tasks() if task.get_name() == "millstream dashboard tail"] != []
    async with asyncio.timeout(10):
        while any(task.get_name() == "millstream dashboard tail" for task in asyncio.all_tasks()):
            await asyncio.sleep(0.01)
    await tails.close()
