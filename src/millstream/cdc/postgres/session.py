"""The one session that holds a slot: it reads ahead into the spool, and acknowledges what is finished.

Opening a slot makes the server decode from its restart point again, so a session stays open over all batches, and
answers the server while Spark works. Nothing is acknowledged but what ``acknowledge`` was told: the ends of finished
batches.
"""

from __future__ import annotations

import select
import struct
import time
from collections.abc import Callable

from millstream.cdc.database import TICK_S, ChangeSession
from millstream.cdc.errors import PositionLost, SourceRefused, SourceUnreachable
from millstream.cdc.postgres import catalog
from millstream.cdc.postgres.connection import Login, ReplicationConnection, ReplicationError, literal, quoted
from millstream.cdc.postgres.pgoutput import (
    BEGIN,
    CHANGES,
    COMMIT,
    RELATION,
    STEERING,
    TRUNCATE,
    Begin,
    Relation,
    format_lsn,
    parse_begin,
    parse_commit,
    parse_relation,
    parse_truncate,
)
from millstream.cdc.spool import LogSpool
from millstream.errors import MillstreamError

SEGMENT_BYTES = 8 << 20
_HUGE = 4 * SEGMENT_BYTES
_BURST = 4_000
_DATA, _KEEPALIVE = b"wk"
_HEADER = 25
_KEEPALIVE_FORM = struct.Struct(">cQqB")
_STATUS = struct.Struct(">cQQQqB")
_EPOCH_S = 946_684_800


class ReplicationSession(ChangeSession):
    """``describe`` turns a relation message into what the catalog knows of the table; None: it is not followed."""

    def __init__(
        self,
        login: Login,
        slot: str,
        publication: str,
        spool: LogSpool,
        *,
        server: str,
        describe: Callable[[Relation], Relation | None],
    ) -> None:
        super().__init__(spool, login.shown)
        self._login = login
        self._slot = slot
        self._publication = publication
        self._server = server
        self._describe = describe
        self._finished = 0
        self._told = 0
        self._received = 0
        self._begin: Begin | None = None
        self._number = 0
        self._followed: dict[int, Relation | None] = {}

    def acknowledge(self, position: int) -> None:
        self._finished = max(self._finished, position)

    def _stream(self) -> None:
        connection = self._opened()
        try:
            with self._spool.lock:
                self._spool.restart()
            self._begin, self._followed, self._told = None, {}, 0
            self._received = self._spool.position
            self._connected()
            self._read(connection)
        finally:
            connection.close()

    def _opened(self) -> ReplicationConnection:
        """Holds the slot, or raises. A slot that somebody else holds is waited for: the server may not have noticed
        yet that its last reader is gone."""
        until: float | None = None
        while True:
            connection = ReplicationConnection(self._login)
            try:
                self._start(connection)
                return connection
            except ReplicationError as error:
                connection.close()
                if error.state != "55006":
                    raise self._explained(error) from error
                patience = catalog.wal_sender_timeout_s(self._login)
                until = until or time.monotonic() + patience
                if time.monotonic() > until or self._ending.is_set():
                    raise catalog.slot_in_use(self._slot, str(error), patience) from error
                self._ending.wait(0.2)
            except BaseException:
                connection.close()
                raise

    def _start(self, connection: ReplicationConnection) -> None:
        found = connection.ask("IDENTIFY_SYSTEM")
        catalog.same_server(self._server, found["systemid"], found["dbname"], self._login)
        start = self._spool.position
        options = f"proto_version '1', publication_names {literal(quoted(self._publication))}"
        connection.start(f"START_REPLICATION SLOT {quoted(self._slot)} LOGICAL {format_lsn(start)} ({options})")
        # Asked while the slot is ours, so that nobody can move it any more. From a position before its own the server
        # would go on silently behind the gap.
        catalog.check_position(self._login, self._slot, start)

    def _explained(self, error: ReplicationError) -> MillstreamError:
        text = str(error)
        if error.state == "55000":
            why = f"slot {self._slot!r} cannot be read any more: {text}. The server has dropped log that it needed. "
            return PositionLost(why + "Drop the slot and begin anew: `millstream pipeline reset`.")
        if error.state == "42704" and "publication" in text:
            return SourceRefused(
                f"the server says: {text}. Either it was dropped, or it is younger than slot {self._slot!r}: then "
                "changes from before it cannot be decoded, ever. Drop the slot and make it after the publication."
            )
        if error.state == "42704":
            why = f"slot {self._slot!r} is gone: {text}. What was written since is lost to it. "
            return PositionLost(why + "Begin anew, with a snapshot: `millstream pipeline reset`.")
        if error.state[:2] in ("28", "42"):
            return SourceRefused(f"{self._login.shown} refuses to replicate: {text}. Give the user REPLICATION.")
        return SourceUnreachable(f"{self._login.shown}: {text}. It is tried again.")

    def _read(self, connection: ReplicationConnection) -> None:
        patience = catalog.wal_sender_timeout_s(self._login)
        interval = max(1.0, patience / 3)
        next_status = 0.0
        while not self._ending.is_set():
            now = time.monotonic()
            if now >= next_status or self._finished > self._told:
                self._status(connection, ask=True)
                next_status = now + interval
            if self._begin is None and self._wait_for_room():
                continue  # the server hears from us all the same
            more, answer = self._burst(connection)
            if answer:
                self._status(connection, ask=False)
            if more:
                continue
            ready, _, _ = select.select([connection.fileno], [], [], TICK_S)
            if ready:
                connection.receive()
                self._heard()
            else:
                self._must_have_heard(2 * patience + 10)

    def _burst(self, connection: ReplicationConnection) -> tuple[bool, bool]:
        """Spools what has arrived: whether there may be more, and whether the server wants an answer."""
        get, spool, answer = connection.get, self._spool, False
        with spool.lock:
            for _ in range(_BURST):
                length, data = get(1)
                if length <= 0:
                    if length < 0:
                        raise self._explained(connection.why_ended())
                    return False, answer
                if data[0] == _DATA:
                    kind = data[_HEADER]
                    if kind in CHANGES:
                        spool.add(data[_HEADER:], change=True)
                        self._number += 1
                        if kind == TRUNCATE:
                            self._emptied(data[_HEADER:])
                        if spool.buffered > _HUGE:
                            spool.part(self._open())
                    elif kind == COMMIT:
                        self._commit(data)
                        if spool.full():
                            break
                    else:
                        self._steer(kind, data[_HEADER:])
                elif data[0] == _KEEPALIVE:
                    _, position, _, wanted = _KEEPALIVE_FORM.unpack_from(data)
                    self._received = max(self._received, position)
                    answer = answer or bool(wanted)
                    if self._begin is None:
                        spool.reach(position)
        return True, answer

    def _commit(self, data: memoryview) -> None:
        spool = self._spool
        spool.add(data[_HEADER:], change=False)
        end = parse_commit(data[_HEADER:]).end
        spool.commit(end)
        self._begin = None
        self._received = max(self._received, end)
        if spool.buffered >= SEGMENT_BYTES:
            spool.seal()

    def _steer(self, kind: int, message: memoryview) -> None:
        if kind == BEGIN:
            self._begin, self._number = parse_begin(message), 0
            self._spool.add(message, change=False)
        elif kind == RELATION:
            relation = parse_relation(message)
            known = self._describe(relation)
            self._followed[relation.id] = known
            self._spool.describe(relation.id, None if known is None else known.to_json(), self._open())
        elif kind not in STEERING:
            raise SourceRefused(
                f"the server sent a message of kind {chr(kind)!r}, which protocol version 1 does not have. "
                "Please report this with the server's version."
            )

    def _emptied(self, message: memoryview) -> None:
        """Told to the planner: a snapshot that is being read may have to begin again."""
        begin = self._begin
        assert begin is not None, "a truncate stands inside a transaction"
        tables = {}
        for half, number in enumerate(parse_truncate(message)):
            table = self._followed.get(number)
            if table is not None:
                tables[f"{table.schema}.{table.table}"] = half
        place = {"lsn": begin.lsn, "xid": begin.xid, "ts_ms": begin.ts_ms, "number": self._number - 1}
        self._spool.turn({**place, "tables": tables})

    def _open(self) -> dict[str, int] | None:
        begin = self._begin
        if begin is None:
            return None
        return {"lsn": begin.lsn, "ts_ms": begin.ts_ms, "xid": begin.xid, "number": self._number}

    def _status(self, connection: ReplicationConnection, *, ask: bool) -> None:
        """Received is what the server may stop to repeat; only finished is what it may forget."""
        self._told = self._finished
        now = int((time.time() - _EPOCH_S) * 1_000_000)
        message = _STATUS.pack(b"r", self._received, self._finished, self._finished, now, int(ask))
        connection.send(message)
