"""A router starts and ends with the web application that contains it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from millstream import Message, Publisher, Router, open_broker
from millstream.runner import TargetRefused, lifespan


def test_router_runs_while_the_application_serves() -> None:
    url, handled = f"local://{uuid4().hex}", []
    router = Router()

    @router.on("orders", group="g", group_start="0")
    async def handle(message: Message) -> None:
        handled.append(message.payload)

    async def order(request: Request) -> PlainTextResponse:
        async with open_broker(url) as broker, Publisher(broker) as publisher:
            await publisher.publish("orders", Message(b"1"))
        return PlainTextResponse("taken")

    app = Starlette(routes=[Route("/", order)], lifespan=lifespan(router, url=url))
    with TestClient(app) as client:
        assert client.get("/").text == "taken"
    assert handled == [b"1"], "what was in flight is handled before the application ends"


def test_object_that_cannot_run_is_refused_before_the_application_serves() -> None:
    app = Starlette(lifespan=lifespan(5))
    with pytest.raises(TargetRefused, match="of the type int"), TestClient(app):
        pass


def test_router_without_a_broker_needs_a_url() -> None:
    with pytest.raises(TargetRefused, match="needs a broker"), TestClient(Starlette(lifespan=lifespan(Router()))):
        pass


@asynccontextmanager
async def nothing(broker: Any) -> AsyncIterator[list[Any]]:
    yield []


def test_lifespan_without_parts_is_refused() -> None:
    app = Starlette(lifespan=lifespan(nothing, url="local://"))
    with pytest.raises(TargetRefused, match="empty"), TestClient(app):
        pass
