"""The replication session of a slot: fills the read-ahead log and acknowledges finished batches.

Whenever a slot is opened, the server decodes again from its restart point. So one session stays open across batches and
answers the server while Spark works. Only the ends of finished batches are acknowledged (``acknowledge``).
"""

from __future__ import annotations

import select
import struct
import time
from collections.abc import Callable

from millstream.cdc.database import POLL_S, ChangeSession
from millstream.cdc.errors import PositionLost, SourceRefused, SourceUnreachable
from millstream.cdc.identity import full_name
from millstream.cdc.postgres import catalog
from millstream.cdc.postgres.connection import Login, ReplicationConnection, ReplicationError, literal, quoted
from millstream.cdc.postgres.pgoutput import (
    BEGIN,
    CHANGES,
    COMMIT,
    CONTROL,
    RELATION,
    TRUNCATE,
    Begin,
    Relation,
    format_lsn,
    parse_begin,
    parse_commit,
    parse_relation,
    parse_truncate,
)
from millstream.cdc.postgres.timeline import Timeline
from millstream.cdc.read_ahead import ReadAheadLog
from millstream.errors import MillstreamError

SEGMENT_BYTES = 8 << 20
MAX_PART_BYTES = 4 * SEGMENT_BYTES
_MAX_MESSAGES_PER_LOCK = 4_000
_DATA, _KEEPALIVE = b"wk"
_HEADER = 25
_KEEPALIVE_FORM = struct.Struct(">cQqB")
_STATUS = struct.Struct(">cQQQqB")
_EPOCH_S = 946_684_800


class ReplicationSession(ChangeSession):
    """The session of one replication slot. ``describe`` completes a relation message from the catalog, and returns None
    if the table is not followed."""

    def __init__(
        self,
        login: Login,
        slot: str,
        publication: str,
        read_ahead: ReadAheadLog,
        *,
        server: str,
        timeline: Timeline,
        describe: Callable[[Relation], Relation | None],
    ) -> None:
        super().__init__(read_ahead, login.display_address)
        self._login = login
        self._slot = slot
        self._publication = publication
        self._server = server
        self._timeline = timeline
        self._describe = describe
        self._finished = 0
        self._acknowledged = 0
        self._received = 0
        self._begin: Begin | None = None
        self._number = 0
        self._followed: dict[int, Relation | None] = {}

    def acknowledge(self, position: int) -> None:
        self._finished = max(self._finished, position)

    def _stream(self) -> None:
        connection = self._open_slot()
        try:
            with self._read_ahead.lock:
                self._read_ahead.restart()
            self._begin, self._followed, self._acknowledged = None, {}, 0
            self._received = self._read_ahead.position
            self._connected()
            self._read(connection)
        finally:
            connection.close()

    def _open_slot(self) -> ReplicationConnection:
        """Opens the slot. If it is in use, waits: the server may not have noticed yet that the previous reader is
        gone."""
        until: float | None = None
        while True:
            connection = ReplicationConnection(self._login)
            try:
                self._start(connection)
                return connection
            except ReplicationError as error:
                connection.close()
                if error.state != "55006":
                    raise self._translate_error(error) from error
                patience = catalog.wal_sender_timeout_s(self._login)
                until = until or time.monotonic() + patience
                if time.monotonic() > until or self._ending.is_set():
                    raise catalog.slot_in_use(self._slot, str(error), patience) from error
                self._ending.wait(0.2)
            except BaseException:  # also after an interruption: an open session would hold the slot
                connection.close()
                raise

    def _start(self, connection: ReplicationConnection) -> None:
        identity = connection.execute("IDENTIFY_SYSTEM")
        catalog.require_same_server(self._server, identity["systemid"], identity["dbname"], self._login)
        start = self._read_ahead.position
        self._timeline.verify(connection, int(identity["timeline"]), start)
        options = f"proto_version '1', publication_names {literal(quoted(self._publication))}"
        connection.start(f"START_REPLICATION SLOT {quoted(self._slot)} LOGICAL {format_lsn(start)} ({options})")
        # Checked while this session has the slot, so that no other reader can advance it. If the requested position is
        # before the slot's position, the server silently starts at the slot's position and leaves a gap.
        catalog.check_position(self._login, self._slot, start)

    def _translate_error(self, error: ReplicationError) -> MillstreamError:
        text = str(error)
        if error.state == "55000":
            why = f"slot {self._slot!r} cannot be read any more: {text}. The server has removed WAL that it needed. "
            return PositionLost(why + "Drop the slot and start over: `millstream pipeline reset`.")
        if error.state == "42704" and "publication" in text:
            return SourceRefused(
                f"the server reports: {text}. Either the publication was dropped, or it is younger than slot "
                f"{self._slot!r}, and changes from before it cannot be decoded. Drop the slot and create it after the "
                "publication."
            )
        if error.state == "42704":
            why = f"slot {self._slot!r} is gone: {text}. Changes since then are lost to this pipeline. "
            return PositionLost(why + "Start over with a snapshot: `millstream pipeline reset`.")
        if error.state[:2] in ("28", "42"):
            return SourceRefused(
                f"{self._login.display_address} refuses to replicate: {text}. Give the user REPLICATION."
            )
        return SourceUnreachable(f"{self._login.display_address}: {text}. Retrying.")

    def _read(self, connection: ReplicationConnection) -> None:
        patience = catalog.wal_sender_timeout_s(self._login)
        interval = max(1.0, patience / 3)
        next_status = 0.0
        while not self._ending.is_set():
            now = time.monotonic()
            if now >= next_status or self._finished > self._acknowledged:
                self._status(connection, execute=True)
                next_status = now + interval
            if self._begin is None and self._wait_for_capacity():
                continue  # the loop still sends status messages
            has_more, answer = self._read_available(connection)
            if answer:
                self._status(connection, execute=False)
            if has_more:
                continue
            ready, _, _ = select.select([connection.fileno], [], [], POLL_S)
            if ready:
                connection.receive()
                self._record_contact()
            else:
                self._check_contact(2 * patience + 10)

    def _read_available(self, connection: ReplicationConnection) -> tuple[bool, bool]:
        """Stores the messages that have arrived. Returns whether there may be more, and whether the server requests a
        status message."""
        get, read_ahead, answer = connection.get, self._read_ahead, False
        with read_ahead.lock:
            for _ in range(_MAX_MESSAGES_PER_LOCK):
                length, data = get(1)
                if length <= 0:
                    if length < 0:
                        raise self._translate_error(connection.why_ended())
                    return False, answer
                if data[0] == _DATA:
                    kind = data[_HEADER]
                    if kind in CHANGES:
                        read_ahead.add(data[_HEADER:], change=True)
                        self._number += 1
                        if kind == TRUNCATE:
                            self._truncated(data[_HEADER:])
                        if read_ahead.buffered > MAX_PART_BYTES:
                            read_ahead.part(self._open_transaction())
                    elif kind == COMMIT:
                        self._commit(data)
                        if read_ahead.full():
                            break
                    else:
                        self._control_message(kind, data[_HEADER:])
                elif data[0] == _KEEPALIVE:
                    _, position, _, requested = _KEEPALIVE_FORM.unpack_from(data)
                    self._received = max(self._received, position)
                    answer = answer or bool(requested)
                    if self._begin is None:
                        read_ahead.reach(position)
        return True, answer

    def _commit(self, data: memoryview) -> None:
        read_ahead = self._read_ahead
        read_ahead.add(data[_HEADER:], change=False)
        end = parse_commit(data[_HEADER:]).end
        read_ahead.commit(end)
        self._begin = None
        self._received = max(self._received, end)
        if read_ahead.buffered >= SEGMENT_BYTES:
            read_ahead.seal()

    def _control_message(self, kind: int, message: memoryview) -> None:
        if kind == BEGIN:
            self._begin, self._number = parse_begin(message), 0
            self._read_ahead.add(message, change=False)
        elif kind == RELATION:
            relation = parse_relation(message)
            described = self._describe(relation)
            self._followed[relation.id] = described
            self._read_ahead.describe(
                relation.id, None if described is None else described.to_json(), self._open_transaction()
            )
        elif kind not in CONTROL:
            raise SourceRefused(
                f"the server sent a message of kind {chr(kind)!r}, which protocol version 1 does not have. "
                "Please report this with the server's version."
            )

    def _truncated(self, message: memoryview) -> None:
        """Reports a truncation to the planner, which may have to restart a snapshot."""
        begin = self._begin
        assert begin is not None, "a truncate stands inside a transaction"
        tables = {}
        for sub_event, number in enumerate(parse_truncate(message)):
            table = self._followed.get(number)
            if table is not None:
                tables[full_name(table.schema, table.table)] = sub_event
        origin = {"lsn": begin.lsn, "xid": begin.xid, "ts_ms": begin.ts_ms, "number": self._number - 1}
        self._read_ahead.add_truncation({**origin, "tables": tables})

    def _open_transaction(self) -> dict[str, int] | None:
        begin = self._begin
        if begin is None:
            return None
        return {"lsn": begin.lsn, "ts_ms": begin.ts_ms, "xid": begin.xid, "number": self._number}

    def _status(self, connection: ReplicationConnection, *, execute: bool) -> None:
        """Sends a status message: received positions as written, finished positions as flushed and applied. The server
        may discard WAL only up to the finished position."""
        self._acknowledged = self._finished
        now = int((time.time() - _EPOCH_S) * 1_000_000)
        message = _STATUS.pack(b"r", self._received, self._finished, self._finished, now, int(execute))
        connection.send(message)
