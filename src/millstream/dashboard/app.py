"""The dashboard as an ASGI application: routes to pages, confirmed actions, and the event stream of live pages.

    app = Starlette(routes=[Mount("/dashboard", Dashboard("redis://..."))])

On loopback every user of the machine may view and act. On other addresses an access token is required, and the
dashboard is read-only by default.
"""

from __future__ import annotations

import hmac
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from millstream import __version__
from millstream.broker import open_blocking_broker, open_broker
from millstream.broker.transport.targets import redacted
from millstream.dashboard.access import MAX_NAME_LENGTH, AccessControl, Sessions, WebSession, cookie_header
from millstream.dashboard.entries import view
from millstream.dashboard.feed import MAX_PAGES_PER_CONNECTION, MAX_TAILS_PER_CONNECTION, Feed, Tails
from millstream.dashboard.pages import ACTIONS, PAGES, dead_letters, stream
from millstream.dashboard.render import Query, Renderer, address, clock, decode_name, local_address
from millstream.dashboard.shared import (
    AUDIT_STREAM,
    PAUSE_S,
    Action,
    Audit,
    LiveStats,
    Question,
    Shared,
    Values,
    WebPage,
)
from millstream.errors import BrokerUnavailable, InvalidArgument, MillstreamError, PermissionDenied
from millstream.model import Entry, EntryId
from millstream.observe.http import is_loopback
from millstream.observe.pipeline_client import PipelineClient

DEADLINE_MS = 3_000
"""Short, because a user waits for the page: an unreachable server is reported soon."""
MAX_FORM_BYTES = 128 << 10
STATIC = Path(__file__).parent / "static"
ALL_INTERFACES = ("", "0.0.0.0", "::")  # noqa: S104  # compared, not bound


class Dashboard:
    """The dashboard as an ASGI application.

    ``url``: of the broker, as for ``open_broker``. ``pipelines``: URLs of processes that run pipelines, and
    ``pipelines_token`` their access token. ``host``: the address on which the dashboard will listen; off loopback
    ``token`` is required and ``read_only`` is the default. ``names``: further host names that browsers use for it,
    such as the name of a proxy.
    """

    def __init__(
        self,
        url: str,
        *,
        pipelines: Sequence[str] = (),
        pipelines_token: str | None = None,
        host: str = "127.0.0.1",
        names: Sequence[str] = (),
        token: str | None = None,
        read_only: bool | None = None,
        pause_s: float = PAUSE_S,
    ) -> None:
        if token is not None and not token:
            raise InvalidArgument("token", "", "a non-empty string, or None")
        is_local = is_loopback(host)
        if not is_local and token is None:
            raise InvalidArgument(
                "token", None, f"a token: {host or 'every address'} can be reached from other machines"
            )
        self.read_only = not is_local if read_only is None else read_only
        self._url = url
        self._token = token
        self._broker = open_broker(url, deadline_ms=DEADLINE_MS)
        self._blocking = open_blocking_broker(url, deadline_ms=DEADLINE_MS)
        clients = [PipelineClient(address, token=pipelines_token) for address in pipelines]
        self.stats = LiveStats(self._broker, self._blocking, pause_s=pause_s)
        self._shared = Shared(self._broker, self._blocking, self.stats, Audit(self._broker), clients)
        self._renderer = Renderer()
        self._sessions = Sessions()
        self._tails = Tails(self._broker, self._entry_html)
        self.feed = Feed(self.stats, self._tails, self._parts)
        self._pages = {page.path: page for page in PAGES}
        host_names = {
            *names,
            *(() if host in ALL_INTERFACES else (host,)),
            *(() if is_local else (socket.gethostname(),)),
        }
        self._access_control = AccessControl(
            self._application(),
            sessions=self._sessions,
            token=token,
            names=frozenset(host_names),
            any_address=not is_local,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._access_control(scope, receive, send)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the brokers. A web server with lifespan support calls this at shutdown."""
        await self.stats.close()
        await self._tails.close()
        await self._broker.close()
        self._blocking.close()

    def _application(self) -> Starlette:
        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            yield
            await self.close()

        return Starlette(
            routes=[
                *(Route(path, self._show) for path in self._pages),
                *(Route(action.path, self._act(action), methods=["GET", "POST"]) for action in ACTIONS),
                Route("/stream/search", self._search),
                Route("/live", self._live),
                Route("/done", self._done),
                Route("/login", self._login, methods=["GET", "POST"]),
                Route("/logout", self._logout, methods=["POST"]),
                Mount("/static", StaticFiles(directory=STATIC)),
            ],
            exception_handlers={HTTPException: self._missing, MillstreamError: self._failed},
            lifespan=lifespan,
        )

    # --- pages -------------------------------------------------------------------------------------------------------

    def _page_at(self, path: str, query: Query) -> WebPage | None:
        if path == dead_letters.OF_ONE_STREAM.path and query.all("dlq"):
            return dead_letters.OF_ONE_STREAM
        return self._pages.get(path)

    async def _show(self, request: Request) -> Response:
        query = Query(request.scope["query_string"])
        path = request.scope["path"].removeprefix(request.scope.get("root_path", "")) or "/"
        page = self._page_at(path, query)
        assert page is not None  # the router only passes known paths
        load = stream.load_with_entries if page.load is stream.load else page.load
        raw = request.scope["query_string"].decode("latin-1")
        live = f"{path}?{raw}" if raw else path
        navigation = {"section": page.section, "page_address": live if page.live and len(live) < 8_000 else ""}
        try:
            values = await load(self._shared, query, _root(request))
        except MillstreamError as error:
            return self._failure(request, error, navigation)
        return self._html(request, page.template, {**values, **navigation}, 404 if values.get("gone") else 200)

    async def _parts(self, page_address: str, root: str) -> dict[str, str] | None:
        """Render the live parts of a page, for its events."""
        path, _, raw = page_address.partition("?")
        query = Query(raw)
        page = self._page_at(path, query)
        if page is None or not page.live:
            return None
        values = await page.load(self._shared, query, root)
        return self._renderer.parts(page.template, root, {**values, "read_only": self.read_only})

    def _entry_html(self, entry: Entry) -> str:
        latest = self.stats.latest
        now_ms = max(entry.id.ms, latest.at_ms if latest else 0)
        return self._renderer.page("entry_item.html", "", {"entry": view(entry, now_ms)})

    async def _search(self, request: Request) -> Response:
        root = _root(request)
        result = await stream.continue_search(self._shared, Query(request.scope["query_string"]), root)
        html = [self._renderer.page("entry_item.html", root, {"entry": entry}) for entry in result["entries"]]
        return JSONResponse({"entries": html, "searched": result["searched"], "next": result["next"]})

    async def _live(self, request: Request) -> Response:
        if self.feed.is_full:
            return Response("too many pages are open; close some\n", 503, {"Retry-After": "10"})
        query = Query(request.scope["query_string"])
        pages = [page for page in query.all("page") if len(page) < 8_000][:MAX_PAGES_PER_CONNECTION]
        tails = []
        for tail in query.all("tail")[:MAX_TAILS_PER_CONNECTION]:
            after, _, encoded_name = tail.partition("~")
            tails.append((decode_name(encoded_name), EntryId.parse(after, argument="tail")))
        events = self.feed.events(pages, tails, _root(request))
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)

    # --- actions -----------------------------------------------------------------------------------------------------

    def _act(self, action: Action) -> Any:
        async def handle(request: Request) -> Response:
            if self.read_only:
                text = "This dashboard is read-only. Start it with --no-read-only, or use the command line."
                return self._message(request, "Read only", text, 403)
            if request.method == "GET":
                question = await action.ask(self._shared, Query(request.scope["query_string"]), _root(request))
                return self._question(request, action, question)
            form = await self._form(request)
            return form if isinstance(form, Response) else await self._execute(request, action, form)

        return handle

    def _question(self, request: Request, action: Action, question: Question) -> Response:
        navigation = {"section": action.section, "page_address": "", "action": _root(request) + action.path}
        return self._html(request, "confirm.html", {**question._asdict(), **navigation})

    async def _execute(self, request: Request, action: Action, form: Query) -> Response:
        """Write an audit note, execute the action, write its outcome. Without the first note nothing is executed."""
        who, description = self._who(request), action.describe(form)
        audit = self._shared.audit
        begun = await audit.begin(who, description)
        try:
            outcome = await action.act(self._shared, form)
        except MillstreamError as error:
            await audit.end(begun, who, description, str(error), succeeded=False)
            raise
        ended = await audit.end(begun, who, description, outcome.text, succeeded=outcome.succeeded)
        return RedirectResponse(_root(request) + address("/done", [("id", str(ended)), ("back", action.section)]), 303)

    async def _done(self, request: Request) -> Response:
        query = Query(request.scope["query_string"])
        result = await self._shared.audit.note(EntryId.parse(query.text("id", max_length=50)))
        if result is None:
            return self._message(request, "Not found", "This audit note does not exist, or was trimmed.", 404)
        id, note = result
        values = {
            "title": "Done" if note.succeeded else "Failed",
            "outcome": note.outcome,
            "succeeded": note.succeeded,
            "what": note.what,
            "by": note.who,
            "when": clock(id.ms),
            "back": _root(request) + local_address(query.text("back")),
            "section": local_address(query.text("back")),
            "page_address": "",
        }
        return self._html(request, "done.html", values)

    def _who(self, request: Request) -> str:
        session: WebSession = request.state.session
        client = request.client.host if request.client else "unknown"
        return f"{session.name or 'unnamed'} ({client})"

    async def _form(self, request: Request) -> Query | Response:
        """Return the submitted form, or an error response if it is too large or its CSRF token is wrong."""
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_FORM_BYTES:
                return self._message(request, "Too large", "The form is too large. Select fewer dead letters.", 413)
        form = Query(body)
        if not self._sessions.is_csrf_valid(request.state.session, form.text("csrf", max_length=100)):
            text = "This form is outdated or was not sent by this dashboard. Go back, reload the page, and try again."
            return self._message(request, "Nothing was changed", text, 403)
        return form

    # --- sessions ----------------------------------------------------------------------------------------------------

    async def _login(self, request: Request) -> Response:
        root = _root(request)
        if request.state.session.trusted:
            back = local_address(Query(request.scope["query_string"]).text("next", max_length=8_000))
            return RedirectResponse(root + back, 303)
        if request.method == "GET":
            query = Query(request.scope["query_string"])
            return self._login_page(request, local_address(query.text("next", max_length=8_000)))
        form = await self._form(request)
        if isinstance(form, Response):
            return form
        back = local_address(form.text("next", max_length=8_000))
        assert self._token is not None  # without an access token every session is trusted
        if not self._sessions.can_log_in():
            return self._login_page(request, back, "Too many wrong tokens. Wait a minute.", 429)
        if not hmac.compare_digest(
            form.text("token", max_length=1_000).encode("utf-8", "replace"), self._token.encode()
        ):
            self._sessions.record_failure()
            return self._login_page(request, back, "The token is wrong.", 401)
        _, cookie = self._sessions.begin(form.text("name", max_length=MAX_NAME_LENGTH), trusted=True)
        return RedirectResponse(root + back, 303, {"Set-Cookie": cookie_header(cookie, request.scope)})

    def _login_page(self, request: Request, back: str, message: str = "", status: int = 200) -> Response:
        values = {"next": back, "error": message, "section": "", "page_address": ""}
        return self._html(request, "login.html", values, status)

    async def _logout(self, request: Request) -> Response:
        form = await self._form(request)
        if isinstance(form, Response):
            return form
        self._sessions.end(request.state.session)
        headers = {"Set-Cookie": cookie_header("", request.scope, life_s=0)}
        return RedirectResponse(_root(request) + "/login", 303, headers)

    # --- responses ---------------------------------------------------------------------------------------------------

    def _html(self, request: Request, template: str, values: Values, status: int = 200) -> HTMLResponse:
        session: WebSession | None = getattr(request.state, "session", None)
        trusted = session is not None and session.trusted
        common = {
            "who": trusted,
            "csrf": self._sessions.csrf(session) if session is not None else "",
            "can_log_out": trusted and self._token is not None,
            "read_only": self.read_only,
            "shown_url": redacted(self._url),
            "version": __version__,
            "audit_stream": AUDIT_STREAM,
            "away": self.stats.away if trusted else None,
            "failed": False,
        }
        return HTMLResponse(self._renderer.page(template, _root(request), {**common, **values}), status)

    def _message(self, request: Request, title: str, text: str, status: int) -> HTMLResponse:
        values = {"title": title, "text": text, "section": "", "page_address": ""}
        return self._html(request, "message.html", values, status)

    def _failure(self, request: Request, error: MillstreamError, navigation: Values) -> HTMLResponse:
        """Return an error page. It subscribes to the page's events, and reloads when the page can be rendered."""
        if isinstance(error, BrokerUnavailable):
            title, status = "The server does not answer", 503
        elif isinstance(error, PermissionDenied):
            title, status = "Permission denied", 403
        else:
            title, status = "The request failed", 400 if isinstance(error, InvalidArgument) else 502
        values = {"title": title, "text": str(error), "failed": status == 503, **navigation}
        return self._html(request, "message.html", values, status)

    async def _failed(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, MillstreamError)
        return self._failure(request, error, {"section": "", "page_address": ""})

    async def _missing(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return self._message(request, "Not found", "This page does not exist.", error.status_code)


def _root(request: Request) -> str:
    root: str = request.scope.get("root_path", "")
    return root
