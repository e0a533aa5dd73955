"""What a query of ``mariadb_changes`` may ask for, beside what every change source may (``cdc/options.py``). Pure.

dsn             mariadb://user@host:3306/database; ?ssl=true, or ?ssl_ca=/path for a certificate of one's own.
tables          without a database: the dsn's.
serverId        the number by which the server knows this reader, unlike every other reader's and server's. By
                default made from ``sourceName``.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from millstream.cdc.mariadb.connection import EXAMPLE, MariadbLogin
from millstream.cdc.options import FollowOptions, address, known_options, number, read_options


@dataclass(frozen=True, slots=True)
class MariadbOptions:
    login: MariadbLogin
    read: FollowOptions
    server_id: int


def mariadb_options(given: Mapping[str, str]) -> MariadbOptions:
    """Raises InvalidChangeOption."""
    values = known_options(given, ("serverId",))
    read = read_options(values, "mariadb")
    made = 1 << 31 | zlib.crc32(read.source.encode()) >> 1  # far from the small numbers that people give their servers
    return MariadbOptions(
        login=MariadbLogin(address(values, EXAMPLE)),
        read=read,
        server_id=number(values, "serverId", made, most=0xFFFFFFFF) or made,
    )
