"""The ports of ``millstream run``: metrics and health of all workers, served by the supervisor.

Lag, length and memory of the streams that the workers read are queried by the supervisor itself, when it is scraped.
"""

from __future__ import annotations

import ipaddress
import logging
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

from starlette.applications import Starlette

from millstream.broker import Broker, open_broker
from millstream.errors import MillstreamError
from millstream.observe import StreamStatsCollector
from millstream.observe.metrics import Exposition
from millstream.observe.service_http import LoopServer, service_app
from millstream.runner.fleet import Fleet
from millstream.runner.fleet_metrics import FleetCollector
from millstream.server import CannotListen
from millstream.server.connections import resolve

log = logging.getLogger("millstream.run")

LOOPBACK: Final = "127.0.0.1"
DEADLINE_MS: Final = 3_000
_PATHS: Final = {"metrics": ("/metrics",), "health": ("/health", "/ready")}


def refuse_open_port(host: str, port: int, token: str | None) -> None:
    """Raises CannotListen if the network can reach the port and there is no access token."""
    public = [at for _, (at, _) in resolve(host, port) if not ipaddress.ip_address(at.split("%")[0]).is_loopback]
    if public and token is None:
        raise CannotListen(
            f"refusing to listen on {public[0]} without an access token: the network could read the names of your "
            f"streams and groups. Pass --http-token-file (or MILLSTREAM_HTTP_TOKEN), or listen on {LOOPBACK}."
        )


class FleetExposition:
    """The text of ``/metrics``: the metrics of the workers, and of the streams that they read.

    Stream stats are read only if the supervisor can reach the broker: it needs a URL, and an embedded broker exists
    only inside a worker.
    """

    def __init__(self, fleet: Fleet, url: str | None) -> None:
        self._fleet = fleet
        self._exposition = Exposition()
        self._exposition.registry.register(FleetCollector(fleet))
        self._url = None if url is None or url.startswith("local:") else url
        self._stack = AsyncExitStack()
        self._broker: Broker | None = None
        self._collector: StreamStatsCollector | None = None
        self._collected_topics: list[str] = []

    async def text(self) -> tuple[bytes, str]:
        topics = self._fleet.topics
        if self._url is not None and topics:
            await self._refresh_streams(topics)
        return self._exposition.text(), self._exposition.content_type

    async def _refresh_streams(self, topics: list[str]) -> None:
        try:
            if self._broker is None:
                self._broker = await self._stack.enter_async_context(
                    open_broker(str(self._url), deadline_ms=DEADLINE_MS)
                )
        except MillstreamError as error:
            log.warning("/metrics has no stream stats: %s", error)
            self._url = None
            return
        if topics != self._collected_topics:
            if self._collector is not None:
                self._exposition.registry.unregister(self._collector)
            self._collector, self._collected_topics = StreamStatsCollector(self._broker, _literal(topics)), topics
            self._exposition.registry.register(self._collector)
        assert self._collector is not None
        await self._collector.refresh()

    async def close(self) -> None:
        await self._stack.aclose()


def _literal(topics: list[str]) -> list[str]:
    """Escapes glob characters, which a topic's name may contain: the collector reads such a name as a pattern."""
    return [re.sub(r"([\\*?\[\]])", r"\\\1", topic) if set(topic) & set("*?[") else topic for topic in topics]


@asynccontextmanager
async def serve_fleet(
    fleet: Fleet, *, metrics_port: int | None, health_port: int | None, host: str, token: str | None, url: str | None
) -> AsyncIterator[list[int]]:
    """Serves the fleet on one port or two while the block lasts; yields the ports.

    It listens before it yields. Raises CannotListen if a port is in use, or open to the network without an access
    token.
    """
    exposition = FleetExposition(fleet, url)
    paths: dict[int, tuple[str, ...]] = {}
    for name, port in (("metrics", metrics_port), ("health", health_port)):
        if port is not None:
            refuse_open_port(host, port, token)
            paths[port] = paths.get(port, ()) + _PATHS[name]
    servers = [
        LoopServer(_app(fleet, exposition, token, served), host=host, port=port, token=token)
        for port, served in paths.items()
    ]
    async with AsyncExitStack() as stack:
        stack.push_async_callback(exposition.close)
        for server, served in zip(servers, paths.values(), strict=True):
            await server.start()
            stack.push_async_callback(server.stop)
            log.info("%s on http://%s:%d", ", ".join(served), host, server.port)
        yield [server.port for server in servers]


def _app(fleet: Fleet, exposition: FleetExposition, token: str | None, paths: tuple[str, ...]) -> Starlette:
    app = service_app(metrics=exposition.text, health=fleet.health, ready=fleet.ready, token=token)
    routes: list[Any] = [route for route in app.router.routes if getattr(route, "path", None) in paths]
    app.router.routes = routes
    return app
