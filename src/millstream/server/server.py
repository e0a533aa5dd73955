"""The loop: one thread, one poller. Each round reads what came, runs it in order of arrival, writes the journal once,
and only then sends replies.

A round holds the embedded broker's lock from the first command to the journal; sending and accepting happen outside.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import weakref
from collections import deque
from functools import partial
from pathlib import Path
from typing import Final

from millstream.broker.embedded import Embedded, Turn
from millstream.engine.blocking import BLOCKED
from millstream.errors import BrokerClosed
from millstream.server.connection import Connection, address_of
from millstream.server.info import add_to_info
from millstream.server.limits import ServerLimits
from millstream.server.listening import listen, listen_on_path, refuse_strangers, resolve
from millstream.server.poller import EDGE, HANGUP, READ, WRITE, Poller
from millstream.wire.replies import ErrorReply, Push, Reply
from millstream.wire.requests import UNAUTHENTICATED
from millstream.wire.resp import encode

logger = logging.getLogger("millstream.server")

READ_BYTES: Final = 64 * 1024
_BROWSERS: Final = (b"POST", b"HOST:")
"""What a web page can make a browser send to a port that is not its own; Redis hangs up on it, and so do we."""


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
        self.limits = limits or ServerLimits()
        self.host = host
        self.unix_socket = unix_socket
        self.input_bytes = 0
        self.output_bytes = 0
        self._embedded = embedded
        self._engine = embedded.engine
        self._guarded = embedded.engine.password is not None
        addresses = resolve(host, port)
        refuse_strangers(addresses, password=self._guarded)
        self._listeners: dict[int, socket.socket] = {}
        for family, (address, wanted) in addresses:
            self._listen(listen(family, (address, wanted or self.port)))
        if unix_socket is not None:
            self._listen(listen_on_path(unix_socket))
        self._poller = Poller()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Other threads may wake us at any time, the end included: it stays open as long as anybody has this object.
        weakref.finalize(self, os.close, self._wake_fd)
        self._connections: dict[int, Connection] = {}
        self._to_send: list[Connection] = []
        self._doomed: list[Connection] = []
        self._ready: deque[Connection] = deque()
        """Connections with requests that came earlier and can run now."""
        self._unsettled: list[tuple[Connection, int]] = []
        """Replies to changes of this round, by their place among the connection's replies."""
        self._foreign: deque[tuple[Connection, Reply]] = deque()
        """What other threads had to deliver."""
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._thread_id = 0
        add_to_info(self, embedded.engine.hooks)

    def _listen(self, sock: socket.socket) -> None:
        self._listeners[sock.fileno()] = sock

    @property
    def port(self) -> int:
        for sock in self._listeners.values():
            if sock.family != socket.AF_UNIX:
                return int(sock.getsockname()[1])
        return 0

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
        self._thread_id = threading.get_ident()
        self._poller.register(self._wake_fd, READ)
        for fd in self._listeners:
            self._poller.register(fd, READ)
        try:
            while not self._stopping:
                self._round(self._poller.wait(self._timeout_ms()))
            self._drain()
        except BrokerClosed:
            logger.warning("the broker was closed while it was being served: no more service")
        finally:
            self._close_everything()

    def _timeout_ms(self) -> int | None:
        if self._ready:
            return 0
        deadline = self._embedded.next_deadline()
        return None if deadline is None else max(0, deadline - self._embedded.clock.now_ms())

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    # --- a round ----------------------------------------------------------------------------------------------------

    def _round(self, events: list[tuple[int, int]]) -> None:
        accepting: list[socket.socket] = []
        with self._embedded.turn() as turn:
            self._take_foreign()
            turn.tick()
            for _ in range(len(self._ready)):
                self._go_on(turn, self._ready.popleft())
            for fd, event in events:
                connection = self._connections.get(fd)
                if connection is not None:
                    self._attend(turn, connection, event)
                elif fd == self._wake_fd:
                    os.eventfd_read(fd)
                elif fd in self._listeners:
                    accepting.append(self._listeners[fd])
            failure = turn.end()
        if failure is not None:
            self._void(failure)
        self._unsettled.clear()
        self._send_all()
        self._close_doomed()
        for sock in accepting:
            self._accept(sock)

    def _attend(self, turn: Turn, connection: Connection, event: int) -> None:
        if event & READ:
            try:
                data = connection.sock.recv(READ_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                data = b""
            if not data:
                self._doom(connection)
                return
            self.input_bytes += len(data)
            if len(data) == READ_BYTES or event & HANGUP:
                self._poller.watch(connection.fd, connection.interest)  # there is more, or the end
            requests = connection.parser.feed(data)
            if connection.inbox or connection.awaiting or connection.finishing:
                self._put_off(connection, requests, 0)
            else:
                self._run(turn, connection, requests)
        elif not event & WRITE:
            self._doom(connection)
        if event & WRITE:
            self._queue(connection)

    def _run(self, turn: Turn, connection: Connection, requests: list[list[bytes]]) -> None:
        """Runs requests until one waits, the client is over a limit, or all are done."""
        session, limits = connection.session, self.limits
        execute, out = turn.execute, connection.out
        done = 0
        added = 0
        try:
            for request in requests:
                if added > limits.paused_output_bytes or done >= limits.turn_requests:
                    break
                done += 1
                reply = execute(session, request)
                if reply is BLOCKED:
                    connection.awaiting = True
                    break
                raw = encode(reply, session.protocol)
                out.append(raw)
                added += len(raw)
                if turn.changed:
                    self._unsettled.append((connection, len(out) - 1))
                if session.closing:
                    connection.finishing = True
                    break
                if type(reply) is ErrorReply and request[0].upper() in _BROWSERS:
                    logger.warning("a browser seems to talk to us from %s: hung up", session.address.decode())
                    added -= len(out.pop())
                    connection.finishing = True
                    break
        except Exception:
            # One client's command must not end the service of all others, whatever is wrong with it.
            logger.exception("an unforeseen error in %r from %s", request[0][:64], session.address.decode())
            out.append(encode(ErrorReply("ERR internal error: see the server's log"), session.protocol))
            connection.finishing = True
        connection.out_bytes += added
        self._queue(connection)
        if done < len(requests):
            self._put_off(connection, requests, done)
        elif self._guarded or connection.parser.fault is not None:
            self._look_behind(turn, connection)

    def _look_behind(self, turn: Turn, connection: Connection) -> None:
        """After all requests that came: authentication may have let more of the input in, or it may be malformed."""
        parser, session = connection.parser, connection.session
        if self._guarded:
            parser.limits = self.limits.request if session.authenticated else UNAUTHENTICATED
            if parser.more and not connection.awaiting and not connection.finishing:
                requests = parser.feed(b"")
                if requests:
                    self._run(turn, connection, requests)
                    return
        if parser.fault is not None and not connection.awaiting and not connection.finishing:
            connection.add(encode(ErrorReply(parser.fault.text)))
            connection.finishing = True

    def _put_off(self, connection: Connection, requests: list[list[bytes]], start: int) -> None:
        if connection.finishing:
            return
        for request in requests[start:]:
            connection.inbox.append(request)
            connection.inbox_bytes += sum(map(len, request))
        self._see_to(connection)

    def _go_on(self, turn: Turn, connection: Connection) -> None:
        """Runs what was put off, as far as possible."""
        if connection.closed or connection.awaiting:
            return
        requests = list(connection.inbox)
        connection.inbox.clear()
        connection.inbox_bytes = 0
        self._run(turn, connection, requests)
        self._see_to(connection)

    # --- replies ----------------------------------------------------------------------------------------------------

    def _deliver(self, connection: Connection, reply: Reply) -> None:
        """Called under the broker's lock: in our own rounds, and by whatever other thread caused the reply."""
        if threading.get_ident() == self._thread_id:
            self._hand_over(connection, reply)
        else:
            self._foreign.append((connection, reply))
            self._wake()

    def _take_foreign(self) -> None:
        while self._foreign:
            self._hand_over(*self._foreign.popleft())

    def _hand_over(self, connection: Connection, reply: Reply) -> None:
        if connection.closed:
            return
        session = connection.session
        connection.add(encode(reply, session.protocol))
        self._queue(connection)
        if session.closing:
            connection.finishing = True
        if connection.awaiting and type(reply) is not Push:
            connection.awaiting = False
            if connection.inbox or connection.parser.fault is not None or connection.parser.more:
                self._ready.append(connection)
        if connection.out_bytes > self.limits.listener_output_bytes and connection.listens:
            logger.warning("%s does not read what it listens to: cut off", session.address.decode())
            self._doom(connection)

    def _void(self, failure: ErrorReply) -> None:
        """The journal could not be written: changes are not confirmed, whatever their replies were."""
        for connection, place in self._unsettled:
            raw = encode(failure)
            connection.out_bytes += len(raw) - len(connection.out[place])
            connection.out[place] = raw

    def _queue(self, connection: Connection) -> None:
        if not connection.queued:
            connection.queued = True
            self._to_send.append(connection)

    def _send_all(self) -> None:
        to_send, self._to_send = self._to_send, []
        for connection in to_send:
            connection.queued = False
            if connection.closed:
                continue
            if connection.out_bytes:
                self.output_bytes += connection.out_bytes
                if not connection.send():
                    self._doom(connection)
                    continue
                self.output_bytes -= connection.out_bytes
            if connection.out_bytes:
                self._see_to(connection)
            elif connection.finishing:
                self._doom(connection)
            elif connection.inbox or connection.interest != READ:
                self._see_to(connection)

    def _see_to(self, connection: Connection) -> None:
        """Decides what the poller looks for, and whether requests that were put off can go on."""
        if connection.closed:
            return
        limits = self.limits
        full = connection.out_bytes > limits.paused_output_bytes
        ahead = connection.inbox_bytes > limits.waiting_input_bytes or (connection.inbox and not connection.awaiting)
        interest = 0 if full or ahead or connection.finishing else READ
        if connection.out_bytes:
            interest |= WRITE
        if interest != connection.interest:
            connection.interest = interest
            self._poller.watch(connection.fd, interest)
        if connection.inbox and not connection.awaiting and not full and connection not in self._ready:
            self._ready.append(connection)

    # --- connections ------------------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(1000):
            try:
                sock, _ = listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                logger.warning("cannot accept a connection: %s", error)
                return
            sock.setblocking(False)
            if len(self._connections) >= self.limits.clients:
                self._engine.stats.rejected_connections += 1
                _say_goodbye(sock, b"-ERR max number of clients reached\r\n")
                continue
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            session = self._embedded.session(address=address_of(sock), trusted=False)
            connection = Connection(sock, session, self.limits.request if session.authenticated else UNAUTHENTICATED)
            session.tag = partial(self._deliver, connection)
            connection.interest = READ
            self._connections[connection.fd] = connection
            self._poller.register(connection.fd, READ | HANGUP | EDGE)

    def _doom(self, connection: Connection) -> None:
        """Closed after the round, because leaving the engine takes the lock that the round holds."""
        if not connection.closed:
            connection.closed = True
            self._doomed.append(connection)

    def _close_doomed(self) -> None:
        while self._doomed:
            connection = self._doomed.pop()
            if not self._embedded.closed:
                self._embedded.drop(connection.session)
            del self._connections[connection.fd]
            self._poller.unregister(connection.fd)
            connection.sock.close()

    # --- the end ----------------------------------------------------------------------------------------------------

    def _drain(self) -> None:
        for fd, listener in self._listeners.items():
            self._poller.unregister(fd)
            listener.close()
        until = time.monotonic() + self.limits.drain_ms / 1000
        self._finish_received(until)
        with self._embedded.turn() as turn:
            for connection in self._connections.values():
                if connection.awaiting:
                    self._engine.unblock(connection.session)
            turn.tick()
            turn.end()
        self._finish_received(until)
        self._send_all()
        while time.monotonic() < until and any(one.out_bytes for one in self._connections.values()):
            for fd, _ in self._poller.wait(50):
                if fd in self._connections:
                    self._queue(self._connections[fd])
            self._send_all()
            self._close_doomed()

    def _finish_received(self, until: float) -> None:
        while time.monotonic() < until:
            events = self._poller.wait(0)
            if not events and not self._ready:
                return
            self._round(events)

    def _close_everything(self) -> None:
        for connection in list(self._connections.values()):
            self._doom(connection)
        self._close_doomed()
        for listener in self._listeners.values():
            listener.close()
        if self.unix_socket is not None:
            self.unix_socket.unlink(missing_ok=True)
        self._poller.close()


def _say_goodbye(sock: socket.socket, text: bytes) -> None:
    try:
        sock.send(text)
    except OSError:
        pass  # it is gone already
    sock.close()
