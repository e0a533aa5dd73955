"""The rounds: each reads what came, runs it in order of arrival, writes the journal once, and only then sends replies.

A round holds the embedded broker's lock from the first command to the journal; sending and closing happen outside.
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

from millstream.broker import Embedded, Turn
from millstream.engine import BLOCKED
from millstream.server.connections import EDGE, HANGUP, READ, WRITE, Connection, Poller, ServerLimits, address_of
from millstream.wire import BROWSERS, UNAUTHENTICATED, ErrorReply, Push, Reply, RequestLimits, encode

logger = logging.getLogger("millstream.server")

READ_BYTES: Final = 64 * 1024


class Service:
    """All connections of one server. Everything here runs on the server's thread, but for ``_deliver``."""

    def __init__(self, embedded: Embedded, poller: Poller, limits: ServerLimits, wake: Callable[[], Any]) -> None:
        self.limits = limits
        self.input_bytes = 0
        self.output_bytes = 0
        self.ready: deque[Connection] = deque()
        """Connections with requests that came earlier and can run now."""
        self.thread_id = threading.get_ident()
        self._embedded = embedded
        self._engine = embedded.engine
        self._poller = poller
        self._wake = wake
        self._connections: dict[int, Connection] = {}
        self._to_send: list[Connection] = []
        self._doomed: list[Connection] = []
        self._unsettled: list[tuple[Connection, int]] = []
        """Replies to changes of this round, by their place among the connection's replies."""
        self._foreign: deque[tuple[Connection, Reply]] = deque()
        """What other threads had to deliver."""

    def __len__(self) -> int:
        return len(self._connections)

    # --- a round ----------------------------------------------------------------------------------------------------

    def round(self, events: list[tuple[int, int]]) -> list[int]:
        """Serves everybody who has something. Returns the descriptors that are not connections."""
        others: list[int] = []
        with self._embedded.turn() as turn:
            self._take_foreign()
            turn.tick()
            self._go_on_with_ready(turn)
            for fd, event in events:
                connection = self._connections.get(fd)
                if connection is not None:
                    self._attend(turn, connection, event)
                else:
                    others.append(fd)
            failure = turn.end()
        if failure is not None:
            self._void(failure)
        self._unsettled.clear()
        self.send()
        return others

    def _go_on_with_ready(self, turn: Turn) -> None:
        """Those who had used up their turn share one between them, so that ever so many of them keep nobody waiting
        who has little to ask."""
        until = self._end_of_turn()
        for _ in range(len(self.ready)):
            self._go_on(turn, self.ready.popleft(), until)
            if perf_counter_ns() > until:
                break

    def _end_of_turn(self) -> int:
        return perf_counter_ns() + self.limits.turn_us * 1000

    def _attend(self, turn: Turn, connection: Connection, event: int) -> None:
        if event & READ:
            until = self._end_of_turn()
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
                self._put_off(connection, requests)
            else:
                self._serve(turn, connection, requests, until)
        elif not event & WRITE:
            self._doom(connection)
        if event & WRITE:
            self._queue(connection)

    def _serve(self, turn: Turn, connection: Connection, requests: list[list[bytes]], until: int) -> None:
        """Runs what came, and what it brought to light: authentication lets more of the input in."""
        parser = connection.parser
        while True:
            done = self._run(turn, connection, requests, until)
            if done < len(requests):
                self._put_off(connection, requests[done:])
                return
            if connection.awaiting or connection.finishing:
                return
            if self._engine.password is not None:
                parser.limits = self.limits.request if connection.session.authenticated else UNAUTHENTICATED
            if parser.more and perf_counter_ns() > until:
                self._let_go_on(connection)
                self._see_to(connection)
                return
            requests = parser.feed(b"") if parser.more else []
            if not requests:
                break
        if parser.fault is not None:
            connection.add(encode(ErrorReply(parser.fault.text)))
            connection.finishing = True

    def _run(self, turn: Turn, connection: Connection, requests: Iterable[list[bytes]], until: int) -> int:
        """Runs requests until one waits, the client is over a limit, its turn is over, or all are done. Returns how
        many were run. None is taken from ``requests`` that is not run."""
        session, limits = connection.session, self.limits
        execute, out = turn.execute, connection.out
        monitoring = self._engine.monitoring
        began = perf_counter_ns()
        done = 0
        added = 0
        try:
            for request in requests:
                done += 1
                reply = execute(session, request)
                # From the end of one to the end of the next: one look at the clock a command is all that costs.
                ended = perf_counter_ns()
                if session.last is not None:
                    session.last.nanoseconds += ended - began
                if ended - began >= monitoring.interesting_ns:
                    monitoring.took(session, request, (ended - began) // 1000)
                began = ended
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
                if type(reply) is ErrorReply and request[0].upper() in BROWSERS:
                    logger.warning("a browser seems to talk to us from %s: hung up", session.address.decode())
                    added -= len(out.pop())
                    connection.finishing = True
                    break
                if ended > until or added > limits.paused_output_bytes:
                    break
        except Exception:
            # One client's command must not end the service of all others, whatever is wrong with it.
            logger.exception("an unforeseen error in %r from %s", request[0][:64], session.address.decode())
            out.append(encode(ErrorReply("ERR internal error: see the server's log"), session.protocol))
            added += len(out[-1])
            connection.finishing = True
        connection.out_bytes += added
        self._queue(connection)
        return done

    def _put_off(self, connection: Connection, requests: list[list[bytes]]) -> None:
        if connection.finishing:
            return
        connection.put_off(requests)
        self._see_to(connection)

    def _go_on(self, turn: Turn, connection: Connection, until: int) -> None:
        """Runs what was put off, as far as possible."""
        connection.ready = False
        if connection.closed or connection.awaiting:
            return
        self._run(turn, connection, connection.take_put_off(), until)
        if not connection.inbox:
            self._serve(turn, connection, [], until)
        self._see_to(connection)

    # --- replies ----------------------------------------------------------------------------------------------------

    def _deliver(self, connection: Connection, reply: Reply) -> None:
        """Called under the broker's lock: in our own rounds, and by whatever other thread caused the reply."""
        if threading.get_ident() == self.thread_id:
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
                self._let_go_on(connection)
        if connection.out_bytes > self.limits.listener_output_bytes and connection.listens:
            logger.warning("%s does not read what it listens to: cut off", session.address.decode())
            self._doom(connection)

    def _void(self, failure: ErrorReply) -> None:
        """The journal could not be written: changes are not confirmed, whatever their replies were."""
        raw = encode(failure)
        for connection, place in self._unsettled:
            if not connection.out[place]:
                continue  # its client wants no answers, and would take this for the next one
            connection.out_bytes += len(raw) - len(connection.out[place])
            connection.out[place] = raw

    def _queue(self, connection: Connection) -> None:
        if not connection.queued:
            connection.queued = True
            self._to_send.append(connection)

    def send(self) -> None:
        """Sends what can be sent, and closes what is to be closed."""
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
        self._close_doomed()

    def _see_to(self, connection: Connection) -> None:
        """Decides what the poller looks for, and whether requests that were put off can go on."""
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
            self._let_go_on(connection)

    def _let_go_on(self, connection: Connection) -> None:
        if not connection.ready:
            connection.ready = True
            self.ready.append(connection)

    # --- connections ------------------------------------------------------------------------------------------------

    def admit(self, sock: socket.socket) -> None:
        """A new client; one too many is told so."""
        sock.setblocking(False)
        if len(self._connections) >= self.limits.clients:
            self._engine.stats.rejected_connections += 1
            _say_goodbye(sock, b"-ERR max number of clients reached\r\n")
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

    def let_waiters_go(self) -> None:
        """Those who wait are answered as if their time were over."""
        with self._embedded.turn() as turn:
            for connection in self._connections.values():
                if connection.awaiting:
                    self._engine.unblock(connection.session)
            turn.tick()
            turn.end()

    def close_idle(self, before_ms: int) -> None:
        """Closes who has sent nothing since then, but for those who wait or listen (the setting ``timeout``)."""
        for connection in self._connections.values():
            if connection.session.seen_ms < before_ms and not connection.awaiting and not connection.listens:
                self._doom(connection)
        self._close_doomed()

    def send_rest(self, fds: list[int]) -> bool:
        """In the end: sends to those who can take more. False: nobody has anything left to take."""
        for fd in fds:
            if fd in self._connections:
                self._queue(self._connections[fd])
        self.send()
        return any(connection.out_bytes for connection in self._connections.values())

    def close(self) -> None:
        for connection in self._connections.values():
            self._doom(connection)
        self._close_doomed()

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


def _say_goodbye(sock: socket.socket, text: bytes) -> None:
    try:
        sock.send(text)
    except OSError:
        pass  # it is gone already
    sock.close()
