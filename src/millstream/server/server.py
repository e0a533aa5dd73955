"""A server's life: it listens, serves in rounds until it is asked to stop, and then drains.

One thread, one poller. What happens in a round is in ``service``.
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

from millstream.broker import BlockingBroker, BlockingEngineLink, Embedded
from millstream.errors import BrokerClosed, InvalidArgument
from millstream.server.connections import READ, Poller, ServerLimits, listen, listen_on_path, refuse_strangers, resolve
from millstream.server.service import Service

if TYPE_CHECKING:
    from millstream.engine import Hooks

logger = logging.getLogger("millstream.server")

IDLE_SWEEP_MS: Final = 1000
ACCEPT_AT_A_TIME: Final = 1000


class Server:
    """Serves an embedded broker to others. ``start`` runs it on a thread, ``run`` on the caller's own."""

    def __init__(
        self,
        embedded: Embedded,
        host: str = "127.0.0.1",
        port: int = 6380,
        *,
        unix_socket: Path | None = None,
        limits: ServerLimits | None = None,
    ) -> None:
        """Listens at once: after this, clients can connect, and are served when it runs. Port 0 takes a free one."""
        self.host = host
        self.port = port
        self.unix_socket = unix_socket
        self._embedded = embedded
        self._listeners: dict[int, socket.socket] = {}
        self._listen_everywhere()
        self._poller = Poller()
        self._wake_read, self._wake_write = os.pipe()
        for fd in (self._wake_read, self._wake_write):
            os.set_blocking(fd, False)
            # Other threads may wake us at any time, the end included: open as long as anybody has this object.
            weakref.finalize(self, os.close, fd)
        self.service = Service(embedded, self._poller, limits or ServerLimits(), self._wake)
        self._idle_ms = 0
        self._stopping = False
        self._thread: threading.Thread | None = None
        embedded.on_configure.append(self._configure)
        self._tell_config()
        add_to_info(self, embedded.engine.hooks)

    @classmethod
    def over(cls, broker: BlockingBroker, host: str = "127.0.0.1", port: int = 6380) -> Server:
        """A server for a broker that was opened with ``local://``, so that other processes can share it. It serves as
        long as somebody has that broker open. An async program opens the same URL once more with
        ``open_blocking_broker`` for this, which gives the same broker."""
        link = broker.link
        if not isinstance(link, BlockingEngineLink):
            raise InvalidArgument(
                "broker", type(link).__name__, "a broker that was opened with local:// or local:///path"
            )
        return cls(link.opened(), host, port)

    def _listen_everywhere(self) -> None:
        addresses = resolve(self.host, self.port)
        refuse_strangers(addresses, password=self._embedded.engine.password is not None)
        for family, (address, _) in addresses:
            sock = listen(family, (address, self.port))
            self._listeners[sock.fileno()] = sock
            self.port = int(sock.getsockname()[1])
        if self.unix_socket is not None:
            sock = listen_on_path(self.unix_socket)
            self._listeners[sock.fileno()] = sock

    def _tell_config(self) -> None:
        config = self._embedded.engine.config
        config.start_with("bind", self.host)
        config.start_with("port", str(self.port))
        limits = self.service.limits
        config.start_with("maxclients", str(limits.clients))
        config.start_with(
            "client-output-buffer-limit", f"normal 0 0 0 slave 0 0 0 pubsub {limits.listener_output_bytes} 0 0"
        )
        config.start_with("proto-max-bulk-len", str(max(limits.request.bulk_bytes, 1 << 20)))

    def _configure(self, name: str, value: str) -> None:
        """CONFIG SET of what is ours. Runs in a round."""
        limits = self.service.limits
        if name == "maxclients":
            self.service.limits = replace(limits, clients=int(value))
        elif name == "proto-max-bulk-len":
            self.service.limit_requests(replace(limits.request, bulk_bytes=int(value)))
        elif name == "timeout":
            self._idle_ms = int(value) * 1000
            self._wake()

    # --- life -------------------------------------------------------------------------------------------------------

    def start(self) -> Server:
        self._thread = threading.Thread(target=self.run, name="millstream-server", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """What was received is answered, those who wait are let go, everything is closed. The broker stays open."""
        self.request_stop()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def request_stop(self) -> None:
        """Safe in a signal handler."""
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
                self._turn_to(self.service.round(self._poller.wait(self._timeout_ms())))
            self._drain()
        except BrokerClosed:
            logger.warning("the broker was closed while it was being served: no more service")
        finally:
            self._close()

    def _timeout_ms(self) -> int | None:
        if self.service.ready:
            return 0
        timeout = self._embedded.due_in_ms()
        if self._idle_ms:
            timeout = IDLE_SWEEP_MS if timeout is None else min(timeout, IDLE_SWEEP_MS)
        return timeout

    def _turn_to(self, others: list[int]) -> None:
        """What is to be done between two rounds."""
        for fd in others:
            if fd in self._listeners:
                self._accept(self._listeners[fd])
            elif fd == self._wake_read:
                os.read(fd, 4096)
        if self._idle_ms:
            self.service.close_idle(self._embedded.clock.now_ms() - self._idle_ms)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPT_AT_A_TIME):
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
            pass  # it has been woken often enough

    # --- the end ----------------------------------------------------------------------------------------------------

    def _drain(self) -> None:
        for fd, listener in self._listeners.items():
            self._poller.unregister(fd)
            listener.close()
        until = time.monotonic() + self.service.limits.drain_ms / 1000
        self._finish_received(until)
        self.service.let_waiters_go()
        self._finish_received(until)
        left = self.service.send_rest([])
        while left and time.monotonic() < until:
            left = self.service.send_rest([fd for fd, _ in self._poller.wait(50)])

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
    began = time.monotonic()
    run_id = secrets.token_hex(20)

    def about_server() -> Mapping[str, object]:
        uptime = int(time.monotonic() - began)
        return {
            "process_id": os.getpid(),
            "run_id": run_id,
            "tcp_port": server.port,
            "uptime_in_seconds": uptime,
            "uptime_in_days": uptime // 86400,
        }

    def about_clients() -> Mapping[str, object]:
        return {"maxclients": server.service.limits.clients}

    def about_stats() -> Mapping[str, object]:
        return {
            "total_net_input_bytes": server.service.input_bytes,
            "total_net_output_bytes": server.service.output_bytes,
        }

    hooks.server, hooks.clients, hooks.stats = about_server, about_clients, about_stats
