"""Connections to the database: SQL, and the replication protocol through libpq, both with the same fixed settings.

Values are sent as text that depends on the session's settings. Every session that reads values, from the log or from a
table, uses the same settings, so that a snapshot and the changes after it show a value in the same form.
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
    # A policy that hides rows from the user makes a query fail. With "on" the rows of a snapshot would be incomplete.
    "row_security": "off",
}
_EXAMPLE = "postgresql://user@host:5432/database"
_REFUSALS = ("28", "3D", "42501")
"""SQL states after which the same login cannot succeed: authorisation, no such database, no privilege."""


@dataclass(frozen=True, slots=True, repr=False)
class Login:
    """Opens connections to the database at an address."""

    address: DatabaseAddress

    def resolve(self, environment: Mapping[str, str] = os.environ, **extra: str) -> str:
        """The connection string for libpq, secrets included. Never log it."""
        try:
            parameters: dict[str, Any] = conninfo.conninfo_to_dict(self.address.resolved(environment))
        except psycopg.ProgrammingError:
            raise InvalidChangeOption("dsn", "***", _EXAMPLE) from None
        password = self.address.password(environment)
        if password is not None:
            parameters["password"] = password
        fixed = " ".join(f"-c {name}={setting}" for name, setting in SETTINGS.items())
        parameters["options"] = f"{parameters.get('options') or ''} {fixed}".strip()
        parameters |= {"client_encoding": "UTF8", "application_name": "millstream", **extra}
        parameters.setdefault("connect_timeout", str(self.address.connect_s))
        parameters.setdefault("tcp_user_timeout", "30000")
        return conninfo.make_conninfo(**parameters)

    @property
    def database(self) -> str:
        """The database's name in events: from the dsn, or the user's name as in libpq, or empty."""
        try:
            parameters = conninfo.conninfo_to_dict(self.address.resolved())
        except psycopg.ProgrammingError:
            raise InvalidChangeOption("dsn", "***", _EXAMPLE) from None
        return str(parameters.get("dbname") or parameters.get("user") or "")

    @property
    def display_address(self) -> str:
        """Host, port and database, for messages."""
        try:
            parameters = conninfo.conninfo_to_dict(self.address.unresolved())
        except (psycopg.ProgrammingError, InvalidChangeOption):
            return "the database"
        port, name = parameters.get("port") or 5432, parameters.get("dbname") or parameters.get("user") or ""
        return f"{parameters.get('host') or 'localhost'}:{port}/{name}"

    @contextmanager
    def connect(self) -> Iterator[psycopg.Connection[Any]]:
        """A connection for SQL, in autocommit mode. Errors of the driver are converted to errors of this package."""
        try:
            with psycopg.connect(self.resolve(), autocommit=True) as connection:
                yield connection
        except psycopg.OperationalError as error:
            raise self.failure(error) from error
        except psycopg.Error as error:
            text = " ".join(str(error).split())
            raise SourceRefused(
                f"{self.display_address} reports: {text}. Grant the missing privilege, or correct the database."
            ) from error

    def failure(self, error: psycopg.Error | str) -> SourceUnreachable | SourceRefused:
        """SourceRefused if the same login cannot succeed; otherwise SourceUnreachable, which is retried."""
        text = " ".join(str(error).split())
        state = getattr(error, "sqlstate", None) or ""
        refused = state.startswith(_REFUSALS) or "authentication failed" in text or "no pg_hba.conf entry" in text
        if refused:
            return SourceRefused(
                f"{self.display_address} refused the login: {text}. Check dsn, password and pg_hba.conf."
            )
        return SourceUnreachable(f"{self.display_address} cannot be reached: {text}. Retrying.")

    def __repr__(self) -> str:
        return f"Login({self.display_address!r})"


class ReplicationError(Exception):
    """The server's error reply to a command of the replication protocol."""

    def __init__(self, state: str, message: str) -> None:
        super().__init__(message)
        self.state = state


class ReplicationConnection:
    """A connection for the replication protocol, for use in one thread."""

    def __init__(self, login: Login) -> None:
        self._pg = pq.PGconn.connect(login.resolve(replication="database").encode())
        if self._pg.status != pq.ConnStatus.OK:
            text = self._pg.error_message.decode(errors="replace")
            self._pg.finish()
            raise login.failure(text)
        self.fileno = self._pg.socket
        self.get = self._pg.get_copy_data
        """``get(1)`` returns (length, memoryview) of the next message, (0, ...) if none has arrived, (-1, ...) at the
        end of the stream."""

    def execute(self, command: str) -> dict[str, str]:
        """Runs a command and returns the first row of the reply. Raises ReplicationError."""
        result = self._pg.exec_(command.encode())
        if result.status not in (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK):
            raise _server_error(result)
        values: dict[str, str] = {}
        for column in range(result.nfields if result.ntuples else 0):
            name, value = result.fname(column), result.get_value(0, column)
            values[(name or b"").decode()] = (value or b"").decode()
        return values

    def start(self, command: str) -> None:
        """Runs a command that starts the stream."""
        result = self._pg.exec_(command.encode())
        if result.status != pq.ExecStatus.COPY_BOTH:
            raise _server_error(result)
        self._pg.nonblocking = 1

    def receive(self) -> None:
        """Reads the available bytes from the socket. Raises OSError if the connection is closed."""
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
        """The server's error after the end of the stream."""
        result = self._pg.get_result()
        return ReplicationError("", "the server ended the stream") if result is None else _server_error(result)

    def close(self) -> None:
        self._pg.finish()


def _server_error(result: pq.abc.PGresult) -> ReplicationError:
    state = result.error_field(pq.DiagnosticField.SQLSTATE) or b""
    message = result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or result.error_message
    return ReplicationError(state.decode(), (message or b"").decode(errors="replace").strip())


def quoted(name: str) -> str:
    """A quoted identifier."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """A string constant for the replication protocol, which takes no parameters."""
    return "'" + text.replace("'", "''") + "'"
