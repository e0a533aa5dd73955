"""The server: listens, serves in rounds until it is stopped, and then drains its connections.

It uses one thread and one poller. ``service`` implements a round.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from millstream.broker import BlockingBroker, Embedded
from millstream.broker.transport.embedded import BlockingEmbeddedTransport
from millstream.errors import BrokerClosed, InvalidArgument
from millstream.server.connections import (
    READ,
    Poller,
    ServerLimits,
    listen,
    listen_on_path,
    require_password_off_loopback,
    resolve,
)
from millstream.server.service import Service

if TYPE_CHECKING:
    from millstream.engine.engine import Hooks

logger = logging.getLogger("millstream.server")

IDLE_CHECK_INTERVAL_MS: Final = 1000
MAX_ACCEPTS_PER_ROUND: Final = 1000


class Server:
    """Serves an embedded broker over RESP. ``start`` runs it on a new thread, ``run`` on the caller's thread."""

    def __init__(
        self,
        embedded: Embedded,
        host: str = "127.0.0.1",
        port: int = 6380,
        *,
        unix_socket: Path | None = None,
        limits: ServerLimits | None = None,
    ) -> None:
        """Starts to listen: clients can connect, and are served once the server runs. Port 0 selects a free port."""
        self.host = host
        self.port = port
        self.unix_socket = unix_socket
        self._embedded = embedded
        self._listeners: dict[int, socket.socket] = {}
        self._open_listeners()
        self._poller = Poller()
        self._wake_read, self._wake_write = os.pipe()
        for fd in (self._wake_read, self._wake_write):
            os.set_blocking(fd, False)
            # Other threads may write to the pipe at any time, also during shutdown, so it stays open until this object
            # is deleted.
            weakref.finalize(self, os.close, fd)
        self.service = Service(embedded, self._poller, limits or ServerLimits(), self._wake)
        self._idle_ms = 0
        self._stopping = False
        self._thread: threading.Thread | None = None
        embedded.on_configure.append(self._configure)
        self._set_config()
        add_to_info(self, embedded.engine.hooks)

    @classmethod
    def over(cls, broker: BlockingBroker, host: str = "127.0.0.1", port: int = 6380) -> Server:
        """Returns a server for a broker that was opened with ``local://``, so that other processes can share it.

        It serves until the last user closes the broker. An async program opens the same URL again with
        ``open_blocking_broker``, which shares the embedded broker.
        """
        transport = broker.transport
        if not isinstance(transport, BlockingEmbeddedTransport):
            raise InvalidArgument(
                "broker", type(transport).__name__, "a broker that was opened with local:// or local:///path"
            )
        return cls(transport.opened(), host, port)

    def _open_listeners(self) -> None:
        addresses = resolve(self.host, self.port)
        require_password_off_loopback(addresses, password=self._embedded.engine.password is not None)
        for family, (address, _) in addresses:
            sock = listen(family, (address, self.port))
            self._listeners[sock.fileno()] = sock
            self.port = int(sock.getsockname()[1])
        if self.unix_socket is not None:
            sock = listen_on_path(self.unix_socket)
            self._listeners[sock.fileno()] = sock

    def _set_config(self) -> None:
        config = self._embedded.engine.config
        config.set_initial("bind", self.host)
        config.set_initial("port", str(self.port))
        limits = self.service.limits
        config.set_initial("maxclients", str(limits.clients))
        config.set_initial(
            "client-output-buffer-limit", f"normal 0 0 0 slave 0 0 0 pubsub {limits.listener_output_bytes} 0 0"
        )
        config.set_initial("proto-max-bulk-len", str(max(limits.request.bulk_bytes, 1 << 20)))

    def _configure(self, name: str, value: str) -> None:
        """Applies CONFIG SET of the server's own parameters. Called during a round."""
        limits = self.service.limits
        if name == "maxclients":
            self.service.limits = replace(limits, clients=int(value))
        elif name == "proto-max-bulk-len":
            self.service.limit_requests(replace(limits.request, bulk_bytes=int(value)))
        elif name == "timeout":
            self._idle_ms = int(value) * 1000
            self._wake()

    # --- running ----------------------------------------------------------------------------------------------------

    def start(self) -> Server:
        self._thread = threading.Thread(target=self.run, name="millstream-server", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Answers received requests, ends blocked commands, and closes all connections. The broker stays open."""
        self.request_stop()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def request_stop(self) -> None:
        """Asks ``run`` to stop. May be called from a signal handler."""
        self._stopping = True
        self._wake()

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self) -> None:
        """Returns after ``request_stop``, or when the broker is closed."""
        self.service.thread_id = threading.get_ident()
        self._poller.register(self._wake_read, READ)
        for fd in self._listeners:
            self._poller.register(fd, READ)
        try:
            while not self._stopping:
                self._after_round(self.service.round(self._poller.wait(self._timeout_ms())))
            self._drain()
        except BrokerClosed:
            logger.warning("the broker was closed while the server was running: stopping the server")
        finally:
            self._close()

    def _timeout_ms(self) -> int | None:
        if self.service.ready:
            return 0
        timeout = self._embedded.due_in_ms()
        if self._idle_ms:
            timeout = IDLE_CHECK_INTERVAL_MS if timeout is None else min(timeout, IDLE_CHECK_INTERVAL_MS)
        return timeout

    def _after_round(self, readable: list[int]) -> None:
        """Accepts connections and closes idle ones, between two rounds."""
        for fd in readable:
            if fd in self._listeners:
                self._accept(self._listeners[fd])
            elif fd == self._wake_read:
                os.read(fd, 4096)
        if self._idle_ms:
            self.service.close_idle(self._embedded.clock.now_ms() - self._idle_ms)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(MAX_ACCEPTS_PER_ROUND):
            try:
                sock, _ = listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                logger.warning("cannot accept a connection: %s", error)
                return
            self.service.admit(sock)

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b"\0")
        except BlockingIOError:
            pass  # the pipe is full, so the server will wake up anyway

    # --- stopping ---------------------------------------------------------------------------------------------------

    def _drain(self) -> None:
        for fd, listener in self._listeners.items():
            self._poller.unregister(fd)
            listener.close()
        until = time.monotonic() + self.service.limits.drain_ms / 1000
        self._finish_received(until)
        self.service.unblock_all()
        self._finish_received(until)
        has_output = self.service.send_remaining([])
        while has_output and time.monotonic() < until:
            has_output = self.service.send_remaining([fd for fd, _ in self._poller.wait(50)])

    def _finish_received(self, until: float) -> None:
        while time.monotonic() < until:
            events = [event for event in self._poller.wait(0) if event[0] != self._wake_read]
            if not events and not self.service.ready:
                return
            self.service.round(events)

    def _close(self) -> None:
        self._embedded.on_configure.remove(self._configure)
        self.service.close()
        for listener in self._listeners.values():
            listener.close()
        if self.unix_socket is not None:
            self.unix_socket.unlink(missing_ok=True)
        self._poller.close()


def add_to_info(server: Server, hooks: Hooks) -> None:
    started_s = time.monotonic()
    run_id = secrets.token_hex(20)

    def server_lines() -> Mapping[str, object]:
        uptime = int(time.monotonic() - started_s)
        return {
            "process_id": os.getpid(),
            "run_id": run_id,
            "tcp_port": server.port,
            "uptime_in_seconds": uptime,
            "uptime_in_days": uptime // 86400,
        }

    def client_lines() -> Mapping[str, object]:
        return {"maxclients": server.service.limits.clients}

    def stats_lines() -> Mapping[str, object]:
        return {
            "total_net_input_bytes": server.service.input_bytes,
            "total_net_output_bytes": server.service.output_bytes,
        }

    hooks.server, hooks.clients, hooks.stats = server_lines, client_lines, stats_lines
