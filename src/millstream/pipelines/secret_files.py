"""How passwords reach Spark's processes: by files that only their user reads, never by a command line or a variable.

Spark shows a query's options in plans, logs, its UI and its event log, its settings on the JVM's command line, and its
environment to every child. So Spark is told a path, and each process that connects reads the rest there.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

from millstream.pipelines.spec.uri import RedisAddress, has_secret

_PREFIX = "millstream-secrets-"


class SecretFiles:
    """URIs with a password, each in a file of mode 0600 in a directory of mode 0700, as long as this object lives."""

    def __init__(self) -> None:
        self._directory: Path | None = None
        self._paths: dict[str, str] = {}

    def options(self, address: RedisAddress) -> dict[str, str]:
        """What the format ``redis_streams`` is told of an address: no secret is in it."""
        own = {} if address.password_file is None else {"passwordFile": address.password_file}
        if not has_secret(address.uri):
            return {"url": address.uri, **own}
        return {"urlFile": self.file(address.uri), **own}

    def close(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        self._directory, self._paths = None, {}

    def file(self, uri: str) -> str:
        """The path of a file that holds this text."""
        if self._directory is None:
            _sweep()
            self._directory = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))  # mode 0700
            weakref.finalize(self, shutil.rmtree, self._directory, ignore_errors=True)
        if uri not in self._paths:
            path = self._directory / f"{len(self._paths)}.uri"
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(uri)
            self._paths[uri] = str(path)
        return self._paths[uri]


def _sweep() -> None:
    """Removes what processes of this user left that were killed. A process that lives keeps its own."""
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        pid = left.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and not Path("/proc", pid).exists() and Path("/proc").is_dir():
            shutil.rmtree(left, ignore_errors=True)


def unreachable(addresses: Iterable[tuple[str, RedisAddress]], master: str) -> Iterator[tuple[str, str]]:
    """Where and why a password cannot reach the executors: those of a cluster see no file that this host makes."""
    if master.startswith("local"):
        return
    for where, address in addresses:
        if has_secret(address.uri):
            why = (
                f"the executors of {master} are other hosts, and the password in the uri of {address} may stand on no "
                "command line. Write the password alone into a file of mode 0600 at the same path on every host, take "
                "it out of the uri, and give password_file: /the/path"
            )
            yield where, why


@contextmanager
def without_secret_variables(uris: Sequence[str]) -> Iterator[None]:
    """While it lasts, children inherit no variable that holds one of these URIs, or its password alone."""
    passwords = {unquote(found) for uri in uris if (found := urlsplit(uri).password)}
    hidden = {
        name: value for name, value in os.environ.items() if value in passwords or any(uri in value for uri in uris)
    }
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)
