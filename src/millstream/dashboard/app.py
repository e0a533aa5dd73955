"""The dashboard as an application (ASGI): addresses to pages, questions to actions, and one stream of events.

    app = Starlette(routes=[Mount("/dashboard", Dashboard("redis://..."))])

On loopback everybody of the machine may look and act; elsewhere it wants a token, and only shows unless it is told
otherwise.
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
from millstream.broker import open_blocking_broker, open_broker, redacted
from millstream.dashboard.entries import view
from millstream.dashboard.feed import MOST_PAGES, MOST_TAILS, Feed, Tails
from millstream.dashboard.guard import MOST_NAME, RequestGuard, Sessions, WebSession, cookie_header
from millstream.dashboard.pages import ACTIONS, PAGES, dead_letters, stream
from millstream.dashboard.render import Query, Renderer, address, clock, local_address, word_name
from millstream.dashboard.shared import (
    AUDIT_STREAM,
    PAUSE_S,
    Action,
    Audit,
    LiveSurvey,
    Question,
    Shared,
    Values,
    WebPage,
)
from millstream.errors import BrokerUnavailable, InvalidArgument, MillstreamError, PermissionDenied
from millstream.model import Entry, EntryId
from millstream.observe import PipelineClient, is_loopback

DEADLINE_MS = 3_000
"""People wait for an answer: a server that is away is said to be away soon."""
MOST_FORM = 128 << 10
STATIC = Path(__file__).parent / "static"
EVERYWHERE = ("", "0.0.0.0", "::")  # noqa: S104  # compared, not bound


class Dashboard:
    """``url`` as ``open_broker`` takes it; ``pipelines``: addresses of processes that run some, and their token.

    ``host``: where it will be reached; off loopback ``token`` is a must, and ``read_only`` is the default. ``names``:
    other names under which it is asked for, such as that of a proxy.
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
            raise InvalidArgument("token", "", "a text that is not empty, or None")
        at_home = is_loopback(host)
        if not at_home and token is None:
            raise InvalidArgument("token", None, f"a token: {host or 'every address'} is not this machine alone")
        self.read_only = not at_home if read_only is None else read_only
        self._url = url
        self._token = token
        self._broker = open_broker(url, deadline_ms=DEADLINE_MS)
        self._blocking = open_blocking_broker(url, deadline_ms=DEADLINE_MS)
        clients = [PipelineClient(one, token=pipelines_token) for one in pipelines]
        self.survey = LiveSurvey(self._broker, self._blocking, pause_s=pause_s)
        self._shared = Shared(self._broker, self._blocking, self.survey, Audit(self._broker), clients)
        self._renderer = Renderer()
        self._sessions = Sessions()
        self._tails = Tails(self._broker, self._entry_html)
        self.feed = Feed(self.survey, self._tails, self._parts)
        self._pages = {page.path: page for page in PAGES}
        known = {*names, *(() if host in EVERYWHERE else (host,)), *(() if at_home else (socket.gethostname(),))}
        self._guarded = RequestGuard(
            self._application(),
            sessions=self._sessions,
            token=token,
            names=frozenset(known),
            any_address=not at_home,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._guarded(scope, receive, send)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Lets go of the brokers. A web server that knows of lifespans does this by itself."""
        await self.survey.close()
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
                *(Route(one.path, self._act(one), methods=["GET", "POST"]) for one in ACTIONS),
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
        assert page is not None  # it was routed here
        load = stream.load_whole if page.load is stream.load else page.load
        raw = request.scope["query_string"].decode("latin-1")
        live = f"{path}?{raw}" if raw else path
        about = {"section": page.section, "page_address": live if page.live and len(live) < 8_000 else ""}
        try:
            values = await load(self._shared, query, _root(request))
        except MillstreamError as problem:
            return self._failure(request, problem, about)
        return self._html(request, page.template, {**values, **about}, 404 if values.get("gone") else 200)

    async def _parts(self, page_address: str, root: str) -> dict[str, str] | None:
        """A page's live parts, for the events."""
        path, _, raw = page_address.partition("?")
        query = Query(raw)
        page = self._page_at(path, query)
        if page is None or not page.live:
            return None
        values = await page.load(self._shared, query, root)
        return self._renderer.parts(page.template, root, {**values, "read_only": self.read_only})

    def _entry_html(self, entry: Entry) -> str:
        look = self.survey.look
        now_ms = max(entry.id.ms, look.at_ms if look else 0)
        return self._renderer.page("entry_item.html", "", {"one": view(entry, now_ms)})

    async def _search(self, request: Request) -> Response:
        root = _root(request)
        found = await stream.search_on(self._shared, Query(request.scope["query_string"]), root)
        html = [self._renderer.page("entry_item.html", root, {"one": one}) for one in found["entries"]]
        return JSONResponse({"entries": html, "searched": found["searched"], "next": found["next"]})

    async def _live(self, request: Request) -> Response:
        if self.feed.full:
            return Response("too many pages are open; close some\n", 503, {"Retry-After": "10"})
        query = Query(request.scope["query_string"])
        pages = [one for one in query.all("page") if len(one) < 8_000][:MOST_PAGES]
        tails = []
        for one in query.all("tail")[:MOST_TAILS]:
            after, _, word = one.partition("~")
            tails.append((word_name(word), EntryId.parse(after, argument="tail")))
        events = self.feed.events(pages, tails, _root(request))
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)

    # --- actions -----------------------------------------------------------------------------------------------------

    def _act(self, action: Action) -> Any:
        async def handle(request: Request) -> Response:
            if self.read_only:
                text = "This dashboard only shows. Start it with --no-read-only, or use the command line."
                return self._message(request, "Read only", text, 403)
            if request.method == "GET":
                asked = await action.ask(self._shared, Query(request.scope["query_string"]), _root(request))
                return self._question(request, action, asked)
            form = await self._form(request)
            return form if isinstance(form, Response) else await self._carry_out(request, action, form)

        return handle

    def _question(self, request: Request, action: Action, asked: Question) -> Response:
        about = {"section": action.section, "page_address": "", "action": _root(request) + action.path}
        return self._html(request, "confirm.html", {**asked._asdict(), **about})

    async def _carry_out(self, request: Request, action: Action, form: Query) -> Response:
        """Noted, done, noted how it ended: what cannot be noted is not done."""
        who, what = self._who(request), action.tell(form)
        audit = self._shared.audit
        begun = await audit.begin(who, what)
        try:
            outcome = await action.act(self._shared, form)
        except MillstreamError as problem:
            await audit.end(begun, who, what, str(problem), fine=False)
            raise
        ended = await audit.end(begun, who, what, outcome.sentence, fine=outcome.fine)
        return RedirectResponse(_root(request) + address("/done", [("id", str(ended)), ("back", action.section)]), 303)

    async def _done(self, request: Request) -> Response:
        query = Query(request.scope["query_string"])
        found = await self._shared.audit.note(EntryId.parse(query.text("id", most=50)))
        if found is None:
            return self._message(request, "Not found", "There is no such note (any more).", 404)
        id, note = found
        values = {
            "title": "Done" if note.fine else "Not done",
            "outcome": note.outcome,
            "fine": note.fine,
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
        """What a form brought, if it came from a page of this session."""
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > MOST_FORM:
                return self._message(request, "Too large", "That form holds too much. Mark fewer letters.", 413)
        form = Query(body)
        if not self._sessions.csrf_fits(request.state.session, form.text("csrf", most=100)):
            text = "This form is out of date, or comes from elsewhere. Go back, reload the page, and try again."
            return self._message(request, "Nothing was done", text, 403)
        return form

    # --- sessions ----------------------------------------------------------------------------------------------------

    async def _login(self, request: Request) -> Response:
        root = _root(request)
        if request.state.session.trusted:
            back = local_address(Query(request.scope["query_string"]).text("next", most=8_000))
            return RedirectResponse(root + back, 303)
        if request.method == "GET":
            query = Query(request.scope["query_string"])
            return self._login_page(request, local_address(query.text("next", most=8_000)))
        form = await self._form(request)
        if isinstance(form, Response):
            return form
        back = local_address(form.text("next", most=8_000))
        assert self._token is not None  # without one every session is trusted
        if not self._sessions.may_try():
            return self._login_page(request, back, "Too many wrong tokens. Wait a minute.", 429)
        if not hmac.compare_digest(form.text("token", most=1_000).encode("utf-8", "replace"), self._token.encode()):
            self._sessions.failed()
            return self._login_page(request, back, "That is not the token.", 401)
        _, cookie = self._sessions.begin(form.text("name", most=MOST_NAME), trusted=True)
        return RedirectResponse(root + back, 303, {"Set-Cookie": cookie_header(cookie, request.scope)})

    def _login_page(self, request: Request, back: str, refused: str = "", status: int = 200) -> Response:
        values = {"next": back, "refused": refused, "section": "", "page_address": ""}
        return self._html(request, "login.html", values, status)

    async def _logout(self, request: Request) -> Response:
        form = await self._form(request)
        if isinstance(form, Response):
            return form
        self._sessions.end(request.state.session)
        gone = {"Set-Cookie": cookie_header("", request.scope, life_s=0)}
        return RedirectResponse(_root(request) + "/login", 303, gone)

    # --- answers -----------------------------------------------------------------------------------------------------

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
            "away": self.survey.away if trusted else None,
            "failed": False,
        }
        return HTMLResponse(self._renderer.page(template, _root(request), {**common, **values}), status)

    def _message(self, request: Request, title: str, text: str, status: int) -> HTMLResponse:
        values = {"title": title, "text": text, "section": "", "page_address": ""}
        return self._html(request, "message.html", values, status)

    def _failure(self, request: Request, problem: MillstreamError, about: Values) -> HTMLResponse:
        """A page that cannot be made now. It stays live, and is made anew when it can."""
        if isinstance(problem, BrokerUnavailable):
            title, status = "The server does not answer", 503
        elif isinstance(problem, PermissionDenied):
            title, status = "The server refuses", 403
        else:
            title, status = "That did not work", 400 if isinstance(problem, InvalidArgument) else 502
        values = {"title": title, "text": str(problem), "failed": status == 503, **about}
        return self._html(request, "message.html", values, status)

    async def _failed(self, request: Request, problem: Exception) -> Response:
        assert isinstance(problem, MillstreamError)
        return self._failure(request, problem, {"section": "", "page_address": ""})

    async def _missing(self, request: Request, problem: Exception) -> Response:
        assert isinstance(problem, HTTPException)
        return self._message(request, "Not found", "There is no such page here.", problem.status_code)


def _root(request: Request) -> str:
    root: str = request.scope.get("root_path", "")
    return root
