"""Connections to the database: SQL, rows of a query as raw packets, and the binary log, all with fixed settings.

The library mysql-replication opens the log (registration, checksums, heartbeats). This module reads the packets itself,
because the library decodes rows one by one and the read-ahead log stores their bytes.
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
"""A PyMySQL connection. PyMySQL has no type annotations."""
EXAMPLE = "mariadb://user@host:3306/database"
HEARTBEAT_S = 5.0
_SETTINGS = (
    "SET SESSION sql_mode = '', time_zone = '+00:00', tx_isolation = 'REPEATABLE-READ', max_statement_time = 0, "
    "net_write_timeout = 31536000, net_read_timeout = 600"
)
_TLS = ("ssl_ca", "ssl_cert", "ssl_key")
_REFUSALS = frozenset((1044, 1045, 1049, 1142, 1143, 1227, 1698, 4151))
"""Error codes after which the same login cannot succeed: user, password, database or privilege."""
_RECEIVE = 1 << 20
_LONGEST = 0xFFFFFF


class MariadbError(Exception):
    """An error packet from the server."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True, repr=False)
class MariadbLogin:
    """Opens connections to an address: ``mariadb://user:password@host:port/database?ssl_ca=/path``."""

    address: DatabaseAddress

    def settings(self) -> dict[str, Any]:
        """Arguments for PyMySQL, secrets included. Never log them."""
        parts = urlsplit(self.address.resolved())
        query = parse_qs(parts.query, keep_blank_values=True)
        if any(len(values) > 1 for values in query.values()):
            raise InvalidChangeOption("dsn", "***", "each option once, such as ?ssl=true")
        options = {name: values[0] for name, values in query.items()}
        if "#" in self.address.resolved():
            raise InvalidChangeOption("dsn", "***", f"{EXAMPLE} without #; in a name or password write %23")
        if parts.scheme != "mariadb" or not parts.hostname or set(options) - {*_TLS, "ssl"}:
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
            "conv": dict(encoders),  # no decoders: every value stays the server's text
        }
        tls = options.get("ssl", "true" if set(options) & {*_TLS} else "false")
        if tls not in ("true", "false") or (tls == "false" and set(options) & {*_TLS}):
            raise InvalidChangeOption(
                "dsn", f"?ssl={tls}", "?ssl=true or ?ssl=false, and no ssl_ca, ssl_cert or ssl_key without TLS"
            )
        if "" in options.values():
            raise InvalidChangeOption("dsn", "***", "each option with a value, such as ?ssl_ca=/path")
        if "ssl_key" in options and "ssl_cert" not in options:
            raise InvalidChangeOption("dsn", "?ssl_key without ssl_cert", "ssl_cert and ssl_key together")
        if tls == "true":
            import ssl

            context = ssl.create_default_context(cafile=options.get("ssl_ca"))
            if "ssl_cert" in options:
                context.load_cert_chain(options["ssl_cert"], options.get("ssl_key"))
            settings["ssl"] = context
        else:
            settings["ssl_disabled"] = True  # else each connection would load all certificates and verify none
        return settings

    @property
    def database(self) -> str:
        """The dsn's database, whose tables need no prefix."""
        return unquote(urlsplit(self.address.resolved()).path.lstrip("/"))

    @property
    def display_address(self) -> str:
        """Host, port and database, for messages."""
        try:
            parts = urlsplit(self.address.unresolved())
            return f"{parts.hostname or 'the database'}:{parts.port or 3306}{parts.path}"
        except (ValueError, InvalidChangeOption):
            return "the database"

    @contextmanager
    def connect(self) -> Iterator[Connection]:
        """A connection for SQL, in autocommit mode. Errors of the driver are converted to errors of this package."""
        try:
            with closing(pymysql.connect(**self.settings(), read_timeout=600)) as connection:
                with connection.cursor() as cursor:
                    cursor.execute(_SETTINGS)
                yield connection
        except (pymysql.err.MySQLError, MariadbError) as error:
            raise self.failure(error) from error

    def failure(self, error: Exception) -> SourceUnreachable | SourceRefused:
        """SourceRefused if the same login cannot succeed; otherwise SourceUnreachable, which is retried."""
        code = error.code if isinstance(error, MariadbError) else error.args[0] if error.args else 0
        text = " ".join(str(error.args[-1] if error.args else error).split())
        if code in _REFUSALS:
            return SourceRefused(f"{self.display_address} reports: {text}. Check dsn, password and privileges.")
        if isinstance(error, (pymysql.err.OperationalError, pymysql.err.InterfaceError, pymysql.err.InternalError)):
            return SourceUnreachable(f"{self.display_address} cannot be reached: {text}. Retrying.")
        return SourceRefused(
            f"{self.display_address} reports: {text}. Grant the missing privilege, or correct the server."
        )

    def __repr__(self) -> str:
        return f"MariadbLogin({self.display_address!r})"


def fetch_rows(connection: Connection, sql: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(sql, values or None)
        return list(cursor.fetchall())


class Packets:
    """Reads packets from a connection's socket, bypassing PyMySQL."""

    def __init__(self, connection: Connection) -> None:
        self._socket = connection._sock
        self._buffer = bytearray()
        self._needed = 0
        """The buffer holds no complete packet before it has this many bytes."""

    def receive(self, timeout_s: float) -> list[bytes] | None:
        """Complete packets that have arrived; None if no byte arrived within ``timeout_s``.

        An empty list means that bytes arrived which do not complete a packet yet: the connection is alive. Raises
        OSError if the connection is closed.
        """
        self._socket.settimeout(timeout_s)
        try:
            data = self._socket.recv(_RECEIVE)
        except TimeoutError:
            return None
        if not data:
            raise ConnectionError("the server has closed the connection")
        self._buffer += data
        if len(self._buffer) < self._needed:
            return []  # parsing after every read would copy a large packet once per piece
        return self._whole()

    def _whole(self) -> list[bytes]:
        packets, buffer, at = [], self._buffer, 0
        while True:
            parts: list[bytes] = []
            end = at
            while True:
                required = end + 4
                if len(buffer) < required:
                    parts = []
                    break
                size = int.from_bytes(buffer[end : end + 3], "little")
                required += size
                if len(buffer) < required:
                    parts = []
                    break
                parts.append(bytes(buffer[end + 4 : end + 4 + size]))
                end += 4 + size
                if size < _LONGEST:  # a longer packet continues in the next one
                    break
            if not parts:
                self._needed = required - at
                break
            packets.append(parts[0] if len(parts) == 1 else b"".join(parts))
            at = end
        del buffer[:at]
        return packets


def server_error(packet: bytes) -> MariadbError:
    [code] = struct.unpack_from("<H", packet, 1)
    return MariadbError(code, packet[9 if packet[3:4] == b"#" else 3 :].decode(errors="replace"))


def raw_rows(connection: Connection, sql: str) -> Iterator[bytes]:
    """The rows of a query as the text protocol sends them. Read all of them before the next query."""
    connection._execute_command(COMMAND.COM_QUERY, sql)
    packets, closings = Packets(connection), 0
    first = True
    while closings < 2:
        received = packets.receive(600)
        if received is None:
            raise ConnectionError("the server sent nothing for 600 s")
        for packet in received:
            if packet[0] == 0xFF:
                raise server_error(packet)
            if first:
                first = False  # the number of columns
            elif packet[0] == 0xFE and len(packet) < 9:
                closings += 1
            elif closings == 1:
                yield packet


class BinlogStream(BinLogStreamReader):  # type: ignore[misc]  # the library has no type annotations
    """The events of the binary log from a position on."""

    def __init__(self, login: MariadbLogin, file: str, offset: int, server_id: int) -> None:
        super().__init__(
            connection_settings={**login.settings(), "read_timeout": 60},
            server_id=server_id,
            log_file=file,
            log_pos=offset,
            resume_stream=True,
            blocking=True,
            slave_heartbeat=HEARTBEAT_S,
            pymysql_wrapper=self._connected,
        )
        try:
            # The private method opens the stream. The public interface would decode rows one by one.
            self._BinLogStreamReader__connect_to_stream()
        except pymysql.err.MySQLError as error:
            self.close()
            raise login.failure(error) from error
        self._packets = Packets(self._stream_connection)

    @staticmethod
    def _connected(**settings: Any) -> Connection:
        connection = pymysql.connect(**settings)
        with connection.cursor() as cursor:
            # While the read-ahead log is full, nothing is read. The server must not close the connection because of it.
            cursor.execute("SET SESSION net_write_timeout = 31536000")
        return connection

    def events(self, timeout_s: float) -> list[bytes] | None:
        """Complete events that have arrived; None if no byte arrived in time; an empty list if only a part of an event
        arrived. Raises MariadbError at the end of the log, OSError at the end of the connection."""
        packets = self._packets.receive(timeout_s)
        if packets is None:
            return None
        events = []
        for packet in packets:
            if packet[0] == 0xFF:
                raise server_error(packet)
            if packet[0] != 0:
                raise MariadbError(0, "the server ended the log")
            events.append(packet[1:])
        return events


def has_checksum(event: bytes) -> bool:
    [checksum] = struct.unpack_from("<I", event, len(event) - 4)
    return zlib.crc32(memoryview(event)[:-4]) == int(checksum)


def checked(event: bytes) -> memoryview:
    """The event without its checksum. Raises SourceUnreachable if the checksum does not match."""
    if not has_checksum(event):
        raise SourceUnreachable("an event of the binary log has a wrong checksum. Reading it again.")
    return memoryview(event)[:-4]


def quoted(name: str) -> str:
    """A quoted identifier."""
    return "`" + name.replace("`", "``") + "`"


def literal(text: str) -> str:
    """A string constant for the sql_mode of these connections."""
    return "'" + text.replace("\\", "\\\\").replace("'", "''").replace("\0", "\\0") + "'"
