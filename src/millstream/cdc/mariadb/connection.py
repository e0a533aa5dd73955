"""Ways into the database: plain SQL, rows of a query as raw packets, and the binary log. All with fixed settings.

mysql-replication opens the log (registration, checksums, heartbeats); packets are read here, because it hands out rows
one by one, and we want their bytes.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pymysql
from pymysql.constants import COMMAND
from pymysql.converters import encoders
from pymysqlreplication import BinLogStreamReader

from millstream.cdc.errors import InvalidChangeOption, SourceRefused, SourceUnreachable
from millstream.cdc.options import DatabaseAddress

Connection = Any
"""PyMySQL's; it has no types."""
EXAMPLE = "mariadb://user@host:3306/database"
HEARTBEAT_S = 5.0
_SETTINGS = (
    "SET SESSION sql_mode = '', time_zone = '+00:00', tx_isolation = 'REPEATABLE-READ', max_statement_time = 0, "
    "net_write_timeout = 31536000, net_read_timeout = 600"
)
_TLS = ("ssl_ca", "ssl_cert", "ssl_key")
_REFUSALS = frozenset((1044, 1045, 1049, 1142, 1143, 1227, 1698, 4151))
"""Errors after which the same login cannot succeed: no such user, password, database, or right."""
_RECEIVE = 1 << 20
_LONGEST = 0xFFFFFF


class MariadbError(Exception):
    """What the server answered instead of what was asked for."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True, repr=False)
class MariadbLogin:
    """Ways into the database at an address: ``mariadb://user:password@host:port/database?ssl_ca=/path``."""

    address: DatabaseAddress

    def settings(self) -> dict[str, Any]:
        """What PyMySQL connects with, secrets included. Never log it."""
        parts = urlsplit(self.address.whole())
        given = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        if parts.scheme != "mariadb" or not parts.hostname or set(given) - {*_TLS, "ssl"}:
            raise InvalidChangeOption("dsn", "***", f"{EXAMPLE}, and ?ssl=true or ?ssl_ca=/path for TLS")
        password = self.address.password()
        settings: dict[str, Any] = {
            "host": parts.hostname,
            "port": parts.port or 3306,
            "user": unquote(parts.username or "root"),
            "password": unquote(parts.password or "") if password is None else password,
            "connect_timeout": self.address.connect_s,
            "charset": "utf8mb4",
            "autocommit": True,
            "conv": dict(encoders),  # and no decoders: every value as the server's own text
        }
        if given.get("ssl", "false") == "true" or "ssl_ca" in given:
            import ssl

            context = ssl.create_default_context(cafile=given.get("ssl_ca"))
            if "ssl_cert" in given:
                context.load_cert_chain(given["ssl_cert"], given.get("ssl_key"))
            settings["ssl"] = context
        else:
            settings["ssl_disabled"] = True  # else every connection would load all certificates, and check none
        return settings

    @property
    def database(self) -> str:
        """The one whose tables need no prefix."""
        return unquote(urlsplit(self.address.whole()).path.lstrip("/"))

    @property
    def shown(self) -> str:
        """Host, port and database, for messages."""
        try:
            parts = urlsplit(self.address.written())
            return f"{parts.hostname or 'the database'}:{parts.port or 3306}{parts.path}"
        except (ValueError, InvalidChangeOption):
            return "the database"

    @contextmanager
    def connect(self) -> Iterator[Connection]:
        """For SQL, in autocommit. What the driver raises while it is open leaves as an error of ours."""
        try:
            with closing(pymysql.connect(**self.settings(), read_timeout=600)) as connection:
                with connection.cursor() as cursor:
                    cursor.execute(_SETTINGS)
                yield connection
        except (pymysql.err.MySQLError, MariadbError) as error:
            raise self.failure(error) from error

    def failure(self, error: Exception) -> SourceUnreachable | SourceRefused:
        """A refusal where the same login can never succeed; else something that may pass."""
        code = error.code if isinstance(error, MariadbError) else error.args[0] if error.args else 0
        text = " ".join(str(error.args[-1] if error.args else error).split())
        if code in _REFUSALS:
            return SourceRefused(f"{self.shown} says: {text}. Check dsn, password and the user's rights.")
        if isinstance(error, (pymysql.err.OperationalError, pymysql.err.InterfaceError, pymysql.err.InternalError)):
            return SourceUnreachable(f"{self.shown} cannot be reached: {text}. It is tried again.")
        return SourceRefused(f"{self.shown} says: {text}. Give the user what it lacks, or correct it there.")

    def __repr__(self) -> str:
        return f"MariadbLogin({self.shown!r})"


def ask(connection: Connection, sql: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(sql, values or None)
        return list(cursor.fetchall())


class Packets:
    """Packets from a connection's socket, past PyMySQL's own reading."""

    def __init__(self, connection: Connection) -> None:
        self._socket = connection._sock
        self._buffer = bytearray()

    def receive(self, timeout_s: float) -> list[bytes]:
        """Those that have arrived; none where nothing comes in time. Raises OSError where the connection is gone."""
        self._socket.settimeout(timeout_s)
        try:
            data = self._socket.recv(_RECEIVE)
        except TimeoutError:
            return []
        if not data:
            raise ConnectionError("the server has closed the connection")
        self._buffer += data
        return self._whole()

    def _whole(self) -> list[bytes]:
        found, buffer, at = [], self._buffer, 0
        while True:
            parts: list[bytes] = []
            end = at
            while len(buffer) >= end + 4:
                size = int.from_bytes(buffer[end : end + 3], "little")
                if len(buffer) < end + 4 + size:
                    parts = []
                    break
                parts.append(bytes(buffer[end + 4 : end + 4 + size]))
                end += 4 + size
                if size < _LONGEST:  # a longer one goes on in the next
                    break
            if not parts or len(parts[-1]) == _LONGEST:
                break
            found.append(parts[0] if len(parts) == 1 else b"".join(parts))
            at = end
        del buffer[:at]
        return found


def server_error(packet: bytes) -> MariadbError:
    [code] = struct.unpack_from("<H", packet, 1)
    return MariadbError(code, packet[9 if packet[3:4] == b"#" else 3 :].decode(errors="replace"))


def raw_rows(connection: Connection, sql: str) -> Iterator[bytes]:
    """The rows of a query as the text protocol sends them. Read to the end before anything else is asked."""
    connection._execute_command(COMMAND.COM_QUERY, sql)
    packets, closings = Packets(connection), 0
    first = True
    while closings < 2:
        several = packets.receive(600)
        if not several:
            raise ConnectionError("the server has been silent for too long")
        for packet in several:
            if packet[0] == 0xFF:
                raise server_error(packet)
            if first:
                first = False  # how many columns there are
            elif packet[0] == 0xFE and len(packet) < 9:
                closings += 1
            elif closings == 1:
                yield packet


class BinlogStream(BinLogStreamReader):  # type: ignore[misc]  # it has no types
    """The binary log from a position on, event by event."""

    def __init__(self, login: MariadbLogin, file: str, place: int, server_id: int) -> None:
        super().__init__(
            connection_settings={**login.settings(), "read_timeout": 60},
            server_id=server_id,
            log_file=file,
            log_pos=place,
            resume_stream=True,
            blocking=True,
            slave_heartbeat=HEARTBEAT_S,
            pymysql_wrapper=self._connected,
        )
        try:
            # Opened by its own step, without which only rows that are decoded one by one could be had.
            self._BinLogStreamReader__connect_to_stream()
        except pymysql.err.MySQLError as error:
            self.close()
            raise login.failure(error) from error
        self._packets = Packets(self._stream_connection)

    @staticmethod
    def _connected(**settings: Any) -> Connection:
        connection = pymysql.connect(**settings)
        with connection.cursor() as cursor:
            # While the spool is full nothing is read: the server must not take that for a dead reader.
            cursor.execute("SET SESSION net_write_timeout = 31536000")
        return connection

    def events(self, timeout_s: float) -> list[bytes]:
        """Events that have arrived. Raises MariadbError where the log ends, OSError where the connection does."""
        found = []
        for packet in self._packets.receive(timeout_s):
            if packet[0] == 0xFF:
                raise server_error(packet)
            if packet[0] != 0:
                raise MariadbError(0, "the server ended the log")
            found.append(packet[1:])
        return found


def has_checksum(event: bytes) -> bool:
    [told] = struct.unpack_from("<I", event, len(event) - 4)
    return zlib.crc32(memoryview(event)[:-4]) == int(told)


def checked(event: bytes) -> memoryview:
    """An event without its checksum, which must fit."""
    if not has_checksum(event):
        raise SourceUnreachable("an event of the binary log was damaged on its way. It is read again.")
    return memoryview(event)[:-4]


def quoted(name: str) -> str:
    """An identifier, whatever is in it."""
    return "`" + name.replace("`", "``") + "`"


def literal(text: str) -> str:
    """A string constant, under the sql_mode that is set here."""
    return "'" + text.replace("\\", "\\\\").replace("'", "''").replace("\0", "\\0") + "'"
