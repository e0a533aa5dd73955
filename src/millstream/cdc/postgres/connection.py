"""Ways into the database: plain SQL, and the replication protocol through libpq. Both with the same fixed settings.

Values reach us as texts that depend on the session's settings. So every session that reads values, whether from the log
or from a table, gets the same ones: that is why a snapshot and the changes behind it tell a value alike.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import conninfo, pq

from millstream.cdc.errors import InvalidChangeOption, SourceRefused, SourceUnreachable
from millstream.cdc.options import DatabaseAddress

SETTINGS = {
    "DateStyle": "ISO",
    "TimeZone": "UTC",
    "IntervalStyle": "iso_8601",
    "extra_float_digits": "1",
    "bytea_output": "hex",
    "lc_monetary": "C",
    "standard_conforming_strings": "on",
    "search_path": "pg_catalog",
    "statement_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
}
_EXAMPLE = "postgresql://user@host:5432/database"
_REFUSALS = ("28", "3D", "42501")
"""SQL states after which the same login cannot succeed: authorisation, no such database, no right."""


@dataclass(frozen=True, slots=True, repr=False)
class Login:
    """Ways into the database at an address."""

    address: DatabaseAddress

    def resolve(self, environment: Mapping[str, str] = os.environ, **more: str) -> str:
        """What libpq connects with, secrets included. Never log it."""
        try:
            given: dict[str, Any] = conninfo.conninfo_to_dict(self.address.whole(environment))
        except psycopg.ProgrammingError:
            raise InvalidChangeOption("dsn", "***", _EXAMPLE) from None
        password = self.address.password(environment)
        if password is not None:
            given["password"] = password
        fixed = " ".join(f"-c {name}={setting}" for name, setting in SETTINGS.items())
        given["options"] = f"{given.get('options') or ''} {fixed}".strip()
        given |= {"client_encoding": "UTF8", "application_name": "millstream", **more}
        given.setdefault("connect_timeout", str(self.address.connect_s))
        given.setdefault("tcp_user_timeout", "30000")
        return conninfo.make_conninfo(**given)

    @property
    def database(self) -> str:
        """What events call it: its name in the dsn, or the user's, as libpq has it; empty where neither is there."""
        try:
            given = conninfo.conninfo_to_dict(self.address.whole())
        except psycopg.ProgrammingError:
            raise InvalidChangeOption("dsn", "***", _EXAMPLE) from None
        return str(given.get("dbname") or given.get("user") or "")

    @property
    def shown(self) -> str:
        """Host, port and database, for messages."""
        try:
            given = conninfo.conninfo_to_dict(self.address.written())
        except (psycopg.ProgrammingError, InvalidChangeOption):
            return "the database"
        port, name = given.get("port") or 5432, given.get("dbname") or given.get("user") or ""
        return f"{given.get('host') or 'localhost'}:{port}/{name}"

    @contextmanager
    def connect(self) -> Iterator[psycopg.Connection[Any]]:
        """For SQL, in autocommit. What the driver raises while it is open leaves as an error of ours."""
        try:
            with psycopg.connect(self.resolve(), autocommit=True) as connection:
                yield connection
        except psycopg.OperationalError as error:
            raise self.failure(error) from error
        except psycopg.Error as error:
            text = " ".join(str(error).split())
            raise SourceRefused(
                f"{self.shown} says: {text}. Give the user what it lacks, or correct it there."
            ) from error

    def failure(self, error: psycopg.Error | str) -> SourceUnreachable | SourceRefused:
        """A refusal where the same login can never succeed; else something that may pass."""
        text = " ".join(str(error).split())
        state = getattr(error, "sqlstate", None) or ""
        refused = state.startswith(_REFUSALS) or "authentication failed" in text or "no pg_hba.conf entry" in text
        if refused:
            return SourceRefused(f"{self.shown} refused the login: {text}. Check dsn, password and pg_hba.conf.")
        return SourceUnreachable(f"{self.shown} cannot be reached: {text}. It is tried again.")

    def __repr__(self) -> str:
        return f"Login({self.shown!r})"


class ReplicationError(Exception):
    """What the server answered to a command of the replication protocol."""

    def __init__(self, state: str, message: str) -> None:
        super().__init__(message)
        self.state = state


class ReplicationConnection:
    """One connection that speaks the replication protocol. For one thread."""

    def __init__(self, login: Login) -> None:
        self._pg = pq.PGconn.connect(login.resolve(replication="database").encode())
        if self._pg.status != pq.ConnStatus.OK:
            text = self._pg.error_message.decode(errors="replace")
            self._pg.finish()
            raise login.failure(text)
        self.fileno = self._pg.socket
        self.get = self._pg.get_copy_data
        """``get(1)``: (length, memoryview) of the next message, (0, ...) where none is there, (-1, ...) at the end."""

    def ask(self, command: str) -> dict[str, str]:
        """The first row of the answer. Raises ReplicationError."""
        result = self._pg.exec_(command.encode())
        if result.status not in (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK):
            raise _server_error(result)
        values: dict[str, str] = {}
        for column in range(result.nfields if result.ntuples else 0):
            name, value = result.fname(column), result.get_value(0, column)
            values[(name or b"").decode()] = (value or b"").decode()
        return values

    def start(self, command: str) -> None:
        """Begins to stream."""
        result = self._pg.exec_(command.encode())
        if result.status != pq.ExecStatus.COPY_BOTH:
            raise _server_error(result)
        self._pg.nonblocking = 1

    def receive(self) -> None:
        """Takes in what the socket has. Raises OSError where it is gone."""
        try:
            self._pg.consume_input()
        except psycopg.OperationalError as error:
            raise ConnectionError(" ".join(str(error).split())) from error

    def send(self, message: bytes) -> None:
        try:
            self._pg.put_copy_data(message)
            self._pg.flush()
        except psycopg.OperationalError as error:
            raise ConnectionError(" ".join(str(error).split())) from error

    def why_ended(self) -> ReplicationError:
        """After the end of the stream."""
        result = self._pg.get_result()
        return ReplicationError("", "the server ended the stream") if result is None else _server_error(result)

    def close(self) -> None:
        self._pg.finish()


def _server_error(result: pq.abc.PGresult) -> ReplicationError:
    state = result.error_field(pq.DiagnosticField.SQLSTATE) or b""
    message = result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or result.error_message
    return ReplicationError(state.decode(), (message or b"").decode(errors="replace").strip())


def quoted(name: str) -> str:
    """An identifier, whatever is in it."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """A string constant for the replication protocol, which takes no parameters."""
    return "'" + text.replace("'", "''") + "'"
