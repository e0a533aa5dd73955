"""The server's rounds: each reads requests, runs them in order of arrival, writes the journal, then sends the replies.

A round holds the embedded broker's lock from the first command to the journal write. Replies are sent and connections
closed without the lock.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from time import perf_counter_ns
from typing import Any, Final

from millstream.broker import Embedded
from millstream.broker.embedded import Turn
from millstream.engine.session import BLOCKED
from millstream.server.connections import EDGE, HANGUP, READ, WRITE, Connection, Poller, ServerLimits, address_of
from millstream.wire import BROWSERS, UNAUTHENTICATED, ErrorReply, Push, Reply, RequestLimits, encode

logger = logging.getLogger("millstream.server")

MAX_READ_BYTES: Final = 64 * 1024


class Service:
    """All connections of one server. Everything runs on the server's thread, except ``_deliver``."""

    def __init__(self, embedded: Embedded, poller: Poller, limits: ServerLimits, wake: Callable[[], Any]) -> None:
        self.limits = limits
        self.input_bytes = 0
        self.output_bytes = 0
        self.ready: deque[Connection] = deque()
        """Connections with deferred requests that can run now."""
        self.thread_id = threading.get_ident()
        self._embedded = embedded
        self._engine = embedded.engine
        self._poller = poller
        self._wake = wake
        self._connections: dict[int, Connection] = {}
        self._to_send: list[Connection] = []
        self._to_close: list[Connection] = []
        self._unjournaled: list[tuple[Connection, int]] = []
        """Replies to changes of this round: the connection, and the index in its ``out``."""
        self._from_other_threads: deque[tuple[Connection, Reply]] = deque()
        """Replies that other threads delivered."""

    def __len__(self) -> int:
        return len(self._connections)

    # --- a round ----------------------------------------------------------------------------------------------------

    def round(self, events: list[tuple[int, int]]) -> list[int]:
        """Handles the events. Returns the descriptors that are not connections."""
        other_fds: list[int] = []
        with self._embedded.turn() as turn:
            self._enqueue_from_other_threads()
            turn.tick()
            self._run_deferred(turn)
            for fd, event in events:
                connection = self._connections.get(fd)
                if connection is not None:
                    self._handle_event(turn, connection, event)
                else:
                    other_fds.append(fd)
            failure = turn.end()
        if failure is not None:
            self._replace_unjournaled(failure)
        self._unjournaled.clear()
        self.send()
        return other_fds

    def _run_deferred(self, turn: Turn) -> None:
        """Runs deferred requests. All these connections share one time slice, so that they do not delay clients with
        few requests, however many they are."""
        until_ns = self._end_of_turn()
        for _ in range(len(self.ready)):
            self._run_deferred_of(turn, self.ready.popleft(), until_ns)
            if perf_counter_ns() > until_ns:
                break

    def _end_of_turn(self) -> int:
        return perf_counter_ns() + self.limits.turn_us * 1000

    def _handle_event(self, turn: Turn, connection: Connection, event: int) -> None:
        if event & READ:
            until_ns = self._end_of_turn()
            try:
                data = connection.sock.recv(MAX_READ_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                data = b""
            if not data:
                self._schedule_close(connection)
                return
            self.input_bytes += len(data)
            if len(data) == MAX_READ_BYTES or event & HANGUP:
                self._poller.watch(
                    connection.fd, connection.interest
                )  # report again: more data, or the end, is pending
            requests = connection.parser.feed(data)
            if connection.inbox or connection.awaiting or connection.finishing:
                self._defer(connection, requests)
            else:
                self._serve(turn, connection, requests, until_ns)
        elif not event & WRITE:
            self._schedule_close(connection)
        if event & WRITE:
            self._queue(connection)

    def _serve(self, turn: Turn, connection: Connection, requests: list[list[bytes]], until_ns: int) -> None:
        """Runs requests, and those that the parser returns after authentication has raised its limits."""
        parser = connection.parser
        while True:
            done = self._run(turn, connection, requests, until_ns)
            if done < len(requests):
                self._defer(connection, requests[done:])
                return
            if connection.awaiting or connection.finishing:
                return
            if self._engine.password is not None:
                parser.limits = self.limits.request if connection.session.authenticated else UNAUTHENTICATED
            if parser.more and perf_counter_ns() > until_ns:
                self._mark_ready(connection)
                self._update_interest(connection)
                return
            requests = parser.feed(b"") if parser.more else []
            if not requests:
                break
        if parser.fault is not None:
            connection.add(encode(ErrorReply(parser.fault.text)))
            connection.finishing = True

    def _run(self, turn: Turn, connection: Connection, requests: Iterable[list[bytes]], until_ns: int) -> int:
        """Runs requests until one blocks, the client exceeds a limit, its time slice ends, or all are done.

        Returns the number of requests that were run, and takes no other requests from ``requests``.
        """
        session, limits = connection.session, self.limits
        execute, out = turn.execute, connection.out
        monitoring = self._engine.monitoring
        start_ns = perf_counter_ns()
        done = 0
        added = 0
        try:
            for request in requests:
                done += 1
                reply = execute(session, request)
                # Measured from the end of the previous command, so that each command reads the clock only once.
                end_ns = perf_counter_ns()
                if session.last is not None:
                    session.last.nanoseconds += end_ns - start_ns
                if end_ns - start_ns >= monitoring.min_reported_ns:
                    monitoring.report_duration(session, request, (end_ns - start_ns) // 1000)
                start_ns = end_ns
                if reply is BLOCKED:
                    connection.awaiting = True
                    break
                raw = encode(reply, session.protocol)
                out.append(raw)
                added += len(raw)
                if turn.changed:
                    self._unjournaled.append((connection, len(out) - 1))
                if session.closing:
                    connection.finishing = True
                    break
                if type(reply) is ErrorReply and request[0].upper() in BROWSERS:
                    logger.warning("received an HTTP request from %s, closing the connection", session.address.decode())
                    added -= len(out.pop())
                    connection.finishing = True
                    break
                if end_ns > until_ns or added > limits.paused_output_bytes:
                    break
        except Exception:
            # An error in the command of one client must not end the service for other clients.
            logger.exception("unexpected error in %r from %s", request[0][:64], session.address.decode())
            out.append(encode(ErrorReply("ERR internal error: see the server's log"), session.protocol))
            added += len(out[-1])
            connection.finishing = True
        connection.out_bytes += added
        self._queue(connection)
        return done

    def _defer(self, connection: Connection, requests: list[list[bytes]]) -> None:
        if connection.finishing:
            return
        connection.defer(requests)
        self._update_interest(connection)

    def _run_deferred_of(self, turn: Turn, connection: Connection, until_ns: int) -> None:
        """Runs the deferred requests of one connection, as far as possible."""
        connection.ready = False
        if connection.closed or connection.awaiting:
            return
        self._run(turn, connection, connection.take_deferred(), until_ns)
        if not connection.inbox:
            self._serve(turn, connection, [], until_ns)
        self._update_interest(connection)

    # --- replies ----------------------------------------------------------------------------------------------------

    def _deliver(self, connection: Connection, reply: Reply) -> None:
        """Called with the broker's lock held, by the server's thread or by another thread whose command caused the
        reply."""
        if threading.get_ident() == self.thread_id:
            self._enqueue(connection, reply)
        else:
            self._from_other_threads.append((connection, reply))
            self._wake()

    def _enqueue_from_other_threads(self) -> None:
        while self._from_other_threads:
            self._enqueue(*self._from_other_threads.popleft())

    def _enqueue(self, connection: Connection, reply: Reply) -> None:
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
                self._mark_ready(connection)
        if connection.out_bytes > self.limits.listener_output_bytes and connection.receives_pushes:
            logger.warning("%s does not read its subscriptions fast enough: disconnected", session.address.decode())
            self._schedule_close(connection)

    def _replace_unjournaled(self, failure: ErrorReply) -> None:
        """Replaces the replies of all changes of this round by an error, after the journal could not be written."""
        raw = encode(failure)
        for connection, index in self._unjournaled:
            if not connection.out[index]:
                continue  # CLIENT REPLY OFF: the client would take the error for the reply of a later command
            connection.out_bytes += len(raw) - len(connection.out[index])
            connection.out[index] = raw

    def _queue(self, connection: Connection) -> None:
        if not connection.queued:
            connection.queued = True
            self._to_send.append(connection)

    def send(self) -> None:
        """Sends replies, and closes connections that are scheduled for it."""
        to_send, self._to_send = self._to_send, []
        for connection in to_send:
            connection.queued = False
            if connection.closed:
                continue
            if connection.out_bytes:
                self.output_bytes += connection.out_bytes
                if not connection.send():
                    self._schedule_close(connection)
                    continue
                self.output_bytes -= connection.out_bytes
            if connection.out_bytes:
                self._update_interest(connection)
            elif connection.finishing:
                self._schedule_close(connection)
            elif connection.inbox or connection.interest != READ:
                self._update_interest(connection)
        self._close_scheduled()

    def _update_interest(self, connection: Connection) -> None:
        """Sets the events to poll for, and marks the connection ready if its deferred requests can run."""
        if connection.closed:
            return
        limits = self.limits
        full = connection.out_bytes > limits.paused_output_bytes
        unfinished = not connection.awaiting and (connection.inbox or connection.ready)
        ahead = connection.inbox_bytes > limits.waiting_input_bytes or unfinished
        interest = 0 if full or ahead or connection.finishing else READ
        if connection.out_bytes:
            interest |= WRITE
        if interest != connection.interest:
            connection.interest = interest
            self._poller.watch(connection.fd, interest)
        if connection.inbox and not connection.awaiting and not full:
            self._mark_ready(connection)

    def _mark_ready(self, connection: Connection) -> None:
        if not connection.ready:
            connection.ready = True
            self.ready.append(connection)

    # --- connections ------------------------------------------------------------------------------------------------

    def admit(self, sock: socket.socket) -> None:
        """Accepts a connection, or rejects it if there are too many clients."""
        sock.setblocking(False)
        if len(self._connections) >= self.limits.clients:
            self._engine.stats.rejected_connections += 1
            _send_and_close(sock, b"-ERR max number of clients reached\r\n")
            return
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        session = self._embedded.session(address=address_of(sock), trusted=False)
        connection = Connection(sock, session, self.limits.request if session.authenticated else UNAUTHENTICATED)
        session.tag = partial(self._deliver, connection)
        connection.interest = READ
        self._connections[connection.fd] = connection
        self._poller.register(connection.fd, READ | HANGUP | EDGE)

    def limit_requests(self, limits: RequestLimits) -> None:
        self.limits = replace(self.limits, request=limits)
        for connection in self._connections.values():
            if connection.parser.limits is not UNAUTHENTICATED:
                connection.parser.limits = limits

    def unblock_all(self) -> None:
        """Ends all blocked commands with the reply of a timeout."""
        with self._embedded.turn() as turn:
            for connection in self._connections.values():
                if connection.awaiting:
                    self._engine.unblock(connection.session)
            turn.tick()
            turn.end()

    def close_idle(self, before_ms: int) -> None:
        """Closes connections without requests since ``before_ms``, except blocked or subscribed ones (``timeout``)."""
        for connection in self._connections.values():
            if connection.session.seen_ms < before_ms and not connection.awaiting and not connection.receives_pushes:
                self._schedule_close(connection)
        self._close_scheduled()

    def send_remaining(self, fds: list[int]) -> bool:
        """While stopping: sends remaining output to connections that are writable. False: all output was sent."""
        for fd in fds:
            if fd in self._connections:
                self._queue(self._connections[fd])
        self.send()
        return any(connection.out_bytes for connection in self._connections.values())

    def close(self) -> None:
        for connection in self._connections.values():
            self._schedule_close(connection)
        self._close_scheduled()

    def _schedule_close(self, connection: Connection) -> None:
        """Schedules the close for after the round, because dropping the session takes the lock that the round holds."""
        if not connection.closed:
            connection.closed = True
            self._to_close.append(connection)

    def _close_scheduled(self) -> None:
        while self._to_close:
            connection = self._to_close.pop()
            if not self._embedded.closed:
                self._embedded.drop(connection.session)
            del self._connections[connection.fd]
            self._poller.unregister(connection.fd)
            connection.sock.close()


def _send_and_close(sock: socket.socket, text: bytes) -> None:
    try:
        sock.send(text)
    except OSError:
        pass  # the client has closed the connection
    sock.close()
