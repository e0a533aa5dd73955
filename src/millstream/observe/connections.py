"""Limits for HTTP connections that apply before a request is authenticated."""

from __future__ import annotations

import asyncio
import logging
import time

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_TIMEOUT_S = 15.0
"""From the first byte (or from connecting) until the request has arrived, head and body."""
UNREAD_TIMEOUT_S = 30.0
"""How long a client may leave its answer unread while the connection's send buffer is full."""
MALFORMED_LOG_INTERVAL_S = 60.0


class _RateLimitedWarnings(logging.LoggerAdapter[logging.Logger]):
    """Uvicorn logs a warning for each malformed request: this passes on one per interval."""

    def __init__(self, logger: logging.Logger, interval_s: float) -> None:
        super().__init__(logger, {})
        self._interval_s = interval_s
        self._next_at = 0.0

    @property
    def level(self) -> int:
        return self.logger.level

    def warning(self, msg: object, *args: object, **kwargs: object) -> None:
        now = time.monotonic()
        if now >= self._next_at:
            self._next_at = now + self._interval_s
            self.logger.warning(f"{msg} (at most one such line in {self._interval_s:g} s)", *args)


def bounded_protocol(
    max_connections: int,
    *,
    request_timeout_s: float = REQUEST_TIMEOUT_S,
    unread_timeout_s: float = UNREAD_TIMEOUT_S,
) -> type[H11Protocol]:
    """Uvicorn's HTTP protocol with at most ``max_connections`` open connections per server.

    A further connection replaces the one that has sent nothing for longest, among those without a request, with an
    incomplete one, or with an unread answer: clients that do nothing do not keep out a probe. If every connection is
    being answered, the new one is closed. A connection is closed if its request does not arrive within
    ``request_timeout_s``, or if its client reads too little of the answer for ``unread_timeout_s``.
    """
    warnings = _RateLimitedWarnings(logging.getLogger("uvicorn.error"), MALFORMED_LOG_INTERVAL_S)
    idle_first: dict[Bounded, None] = {}

    class Bounded(H11Protocol):
        _request_timer: asyncio.TimerHandle | None = None
        _unread_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
            self.logger = warnings  # type: ignore[assignment]  # it has what uvicorn calls
            super().connection_made(transport)
            idle_first[self] = None
            self._watch_request()
            if len(idle_first) > max_connections:
                closing = next(connection for connection in idle_first if connection.is_waiting_for_client())
                # At the latest, this connection: it has no request yet.
                del idle_first[closing]
                closing.transport.abort()  # close() would wait for a client that does not read the response

        def is_waiting_for_client(self) -> bool:
            """Whether there is nothing to lose for the server: no request, half a request, or an unread answer."""
            if self.cycle is None or self.cycle.response_complete or self.flow.write_paused:
                return True
            return self.conn.their_state is h11.SEND_BODY

        def pause_writing(self) -> None:
            super().pause_writing()
            if self._unread_timer is None:
                self._unread_timer = self.loop.call_later(unread_timeout_s, self.transport.abort)

        def resume_writing(self) -> None:
            self._stop_unread_timer()
            super().resume_writing()

        def _stop_unread_timer(self) -> None:
            if self._unread_timer is not None:
                self._unread_timer.cancel()
                self._unread_timer = None

        def data_received(self, data: bytes) -> None:
            if self in idle_first:  # move to the end: it is replaced last
                idle_first[self] = idle_first.pop(self)
            super().data_received(data)
            self._watch_request()

        def _watch_request(self) -> None:
            """Starts the timer while a request is incomplete, and stops it when the request has arrived."""
            is_incomplete = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
            if is_incomplete and self._request_timer is None:
                self._request_timer = self.loop.call_later(request_timeout_s, self._close_incomplete)
            elif not is_incomplete:
                self._stop_timer()

        def _close_incomplete(self) -> None:
            self._request_timer = None
            if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
                self.transport.abort()

        def _stop_timer(self) -> None:
            if self._request_timer is not None:
                self._request_timer.cancel()
                self._request_timer = None

        def connection_lost(self, exc: Exception | None) -> None:
            idle_first.pop(self, None)
            self._stop_timer()
            self._stop_unread_timer()
            super().connection_lost(exc)

    return Bounded
