"""Who may look and who may act, tried from outside, without a browser that would help."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from millstream import Broker, open_broker
from millstream.dashboard import Dashboard
from millstream.errors import InvalidArgument

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
    found = re.search(r'name="csrf" value="([^"]+)"', html)
    assert found is not None
    return found[1]


async def test_every_answer_carries_a_policy_that_runs_nothing_foreign(broker: Broker) -> None:
    async with dashboard() as shown, client(shown) as http:
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
    async with dashboard() as shown, client(shown) as http:
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
async def test_a_foreign_page_or_name_gets_nothing(broker: Broker, headers: dict[str, str]) -> None:
    async with dashboard() as shown, client(shown, **headers) as http:
        answer = await http.get("/")
        assert answer.status_code == 403
        assert "set-cookie" not in answer.headers
        assert "<html" not in answer.text


async def test_a_link_on_another_site_leads_here(broker: Broker) -> None:
    followed = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    async with dashboard() as shown, client(shown, **followed) as http:
        assert (await http.get("/")).status_code == 200
        assert (await http.post("/dead-letters/confirm")).status_code == 403


async def test_an_action_wants_the_form_of_this_session_from_this_site(broker: Broker) -> None:
    letter = await broker.xadd("{orders}.dlq", BURIED)
    ask = f"/dead-letters/confirm?dlq=%7Borders%7D.dlq&verb=purge&id={letter}"
    async with dashboard() as shown, client(shown) as http, client(shown) as other:
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
            await httpx.AsyncClient(transport=httpx.ASGITransport(app=shown), base_url=HERE).post(
                "/dead-letters/confirm", data={**form, "csrf": csrf}, headers=FORM
            ),
        ]
        assert [answer.status_code for answer in refused] == [403] * 5
        assert await broker.xlen("{orders}.dlq") == 1
        assert await broker.xlen("millstream.audit") == 0

        done = await http.post("/dead-letters/confirm", data={**form, "csrf": csrf}, headers=FORM)
        assert done.status_code == 303
        assert "1 dead letter was thrown away" in (await http.get(done.headers["location"])).text
        assert await broker.xlen("{orders}.dlq") == 0
    await broker.delete_stream("millstream.audit")


async def test_the_cookie_is_not_for_scripts_and_not_for_other_sites(broker: Broker) -> None:
    async with dashboard() as shown, client(shown) as http:
        cookie = (await http.get("/")).headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Lax" in cookie
        assert "Path=/" in cookie
        assert "set-cookie" not in (await http.get("/")).headers, "it is kept"


async def test_with_a_token_nothing_is_shown_before_it_was_brought(broker: Broker) -> None:
    await broker.xadd("very-secret-stream", {"a": "b"})
    async with dashboard(token=TOKEN) as shown, client(shown) as http:
        for path in ("/", "/stream?name=very-secret-stream", "/dead-letters", "/done?id=1-1"):
            answer = await http.get(path)
            assert (answer.status_code, answer.headers["location"].partition("?")[0]) == (303, "/login")
            assert "very-secret" not in answer.text
        for path in ("/live?page=/", "/stream/search?name=very-secret-stream&q=b"):
            assert (await http.get(path, headers={"accept": "application/json"})).status_code == 401
        bearer = await http.get("/", headers={"authorization": f"Bearer {TOKEN}"})
        assert "very-secret-stream" in bearer.text
    await broker.delete_stream("very-secret-stream")


async def test_logging_in_with_the_token_and_out_again(broker: Broker) -> None:
    async with dashboard(token=TOKEN) as shown, client(shown) as http:
        page = await http.get("/login?next=/dead-letters")
        form = {"csrf": csrf_in(page.text), "name": "ana", "next": "/dead-letters"}
        wrong = await http.post("/login", data={**form, "token": "guess"}, headers=FORM)
        assert (wrong.status_code, "That is not the token" in wrong.text) == (401, True)
        right = await http.post("/login", data={**form, "token": TOKEN}, headers=FORM)
        assert (right.status_code, right.headers["location"]) == (303, "/dead-letters")
        assert TOKEN not in right.headers["set-cookie"]
        inside = await http.get("/")
        assert inside.status_code == 200
        await http.post("/logout", data={"csrf": csrf_in(inside.text)}, headers=FORM)
        assert (await http.get("/")).status_code == 303


@pytest.mark.parametrize("where", ["//evil.example", "https://evil.example", "/\\evil.example", "javascript:alert(1)"])
async def test_logging_in_leads_nowhere_else(broker: Broker, where: str) -> None:
    async with dashboard(token=TOKEN) as shown, client(shown) as http:
        page = await http.get("/login", params={"next": where})
        form = {"csrf": csrf_in(page.text), "next": where, "token": TOKEN}
        assert (await http.post("/login", data=form, headers=FORM)).headers["location"] == "/"


async def test_wrong_tokens_make_everybody_wait(broker: Broker) -> None:
    async with dashboard(token=TOKEN) as shown, client(shown) as http:
        form = {"csrf": csrf_in((await http.get("/login")).text), "token": "guess"}
        tried = [(await http.post("/login", data=form, headers=FORM)).status_code for _ in range(12)]
        assert tried == [401] * 10 + [429] * 2


async def test_read_only_shows_and_does_nothing(broker: Broker) -> None:
    letter = await broker.xadd("{orders}.dlq", BURIED)
    async with dashboard(read_only=True) as shown, client(shown) as http:
        listed = (await http.get("/dead-letters?dlq=%7Borders%7D.dlq")).text
        assert str(letter) in listed
        assert "Purge" not in listed
        asked = await http.get(f"/dead-letters/confirm?dlq=%7Borders%7D.dlq&verb=purge&id={letter}")
        done = await http.post("/dead-letters/confirm", data={"dlq": "{orders}.dlq", "verb": "purge"}, headers=FORM)
        assert (asked.status_code, done.status_code) == (403, 403)
        assert await broker.xlen("{orders}.dlq") == 1
    await broker.delete_stream("{orders}.dlq")


def test_off_loopback_it_wants_a_token_and_only_shows() -> None:
    with pytest.raises(InvalidArgument, match="token"):
        Dashboard("local://", host="0.0.0.0")
    assert Dashboard("local://", host="0.0.0.0", token=TOKEN).read_only
    assert not Dashboard("local://", host="0.0.0.0", token=TOKEN, read_only=False).read_only
    assert not Dashboard("local://", host="::1").read_only


async def test_off_loopback_it_answers_to_its_address_and_to_the_names_it_was_told(broker: Broker) -> None:
    shown = dashboard(host="0.0.0.0", token=TOKEN, names=["streams.example"])
    async with shown, client(shown, authorization=f"Bearer {TOKEN}") as http:
        for host, status in (("10.0.0.5:8090", 200), ("streams.example", 200), ("evil.example", 403)):
            assert (await http.get("/", headers={"host": host})).status_code == status


async def test_secrets_of_urls_are_never_shown() -> None:
    shown = Dashboard("redis://:hunter2@127.0.0.1:1/0", pause_s=60)
    async with shown, client(shown) as http:
        for path in ("/", "/stream?name=orders", "/dead-letters?dlq=x"):
            answer = await http.get(path)
            assert "hunter2" not in answer.text
        assert "redis://***@127.0.0.1:1/0" in answer.text
        assert answer.status_code == 503


async def test_an_action_that_cannot_be_noted_is_not_done(broker: Broker) -> None:
    letter = await broker.xadd("{orders}.dlq", BURIED)
    await broker.set("millstream.audit", "in the way")
    async with dashboard() as shown, client(shown) as http:
        page = await http.get(f"/dead-letters/confirm?dlq=%7Borders%7D.dlq&verb=purge&id={letter}")
        form = {"csrf": csrf_in(page.text), "dlq": "{orders}.dlq", "verb": "purge", "id": str(letter)}
        assert (await http.post("/dead-letters/confirm", data=form, headers=FORM)).status_code == 502
        assert await broker.xlen("{orders}.dlq") == 1
    await broker.delete("millstream.audit", "{orders}.dlq")


async def test_a_form_that_holds_too_much_is_refused(broker: Broker) -> None:
    async with dashboard() as shown, client(shown) as http:
        answer = await http.post("/dead-letters/confirm", content=b"a=" + b"x" * 200_000, headers=FORM)
        assert answer.status_code == 413


async def test_it_is_mounted_beside_an_application_under_its_own_root(broker: Broker) -> None:
    from starlette.applications import Starlette
    from starlette.routing import Mount

    await broker.xadd("orders", {"a": "b"})
    async with dashboard() as shown:
        app = Starlette(routes=[Mount("/ops/streams", shown)])
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url=HERE) as http:
            page = await http.get("/ops/streams/")
            assert 'href="/ops/streams/stream?name=orders"' in page.text
            assert 'src="/ops/streams/static/live.js"' in page.text
            assert "Path=/ops/streams" in page.headers["set-cookie"]
            assert (await http.get("/ops/streams/static/live.js")).status_code == 200
            assert (await http.get("/ops/streams/stream?name=orders")).status_code == 200
