"""The Redis servers of a spec: checked early, and never passed to Spark or printed with their password.

Spark shows a query's options in plans, logs, its UI and its event log, its settings on the JVM's command line, and its
environment to every child process. So Spark receives the path of a file that only its user can read, and each process
that connects reads the address from it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple
from urllib.parse import unquote, urlsplit

from pydantic import AfterValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from millstream.broker.transport.targets import redacted, target_of
from millstream.errors import AuthenticationFailed, InvalidArgument, MillstreamError, PermissionDenied

if TYPE_CHECKING:
    from millstream import BlockingBroker

log = logging.getLogger("millstream.pipelines")
_PING_MS = 2_000
SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")
# Greedy, because a password may contain an @ that is not quoted.
_USERINFO = re.compile(r"(?<=://)[^/?#]*@")
_PASSWORDS = re.compile(r"(?<=[?&])[a-z_]*password=[^&]*")


def _checked(text: str) -> str:
    scheme = text.partition("://")[0]
    if scheme == "local":
        why = (
            "local:// exists in one process, not in Spark's workers; start `millstream serve` and give its redis:// URL"
        )
        raise PydanticCustomError("uri", "{why}", {"why": why})
    if "://" not in text or scheme not in SCHEMES:
        raise PydanticCustomError("uri", "write a URI of {schemes}", {"schemes": ", ".join(f"{s}://" for s in SCHEMES)})
    try:
        target_of(text)
    except InvalidArgument as error:
        raise PydanticCustomError("uri", "write {allowed}", {"allowed": error.allowed}) from error
    return text


RedisUri = Annotated[str, AfterValidator(_checked), WithJsonSchema({"type": "string", "format": "uri"})]


class NotAnswering(MillstreamError):
    """The server at an address of the spec does not answer now."""

    retryable = True


class Refusal(NamedTuple):
    """A permanent error of an address. ``denied``: the server refused the user or the password."""

    why: str
    denied: bool


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """A Redis of a spec. ``password_file`` contains its password; every process that connects reads it."""

    uri: str
    password_file: str | None = None

    def open(self, **settings: Any) -> BlockingBroker:
        """A broker for this process. Close it."""
        from millstream import open_blocking_broker

        return open_blocking_broker(self.url(), **settings)

    def url(self) -> str:
        """The URL to connect to, with its secrets. Never log it."""
        from millstream.spark.connection import Address

        return Address(self.uri, password_file=self.password_file).resolve()

    def refusal(self) -> Refusal | None:
        """The permanent error of this address; None if it works. Raises NotAnswering after a transient error."""
        try:
            with self.open(deadline_ms=_PING_MS) as broker:
                broker.ping()
        except (AuthenticationFailed, PermissionDenied, InvalidArgument) as error:
            return Refusal(f"{self}: {type(error).__name__}: {error}", not isinstance(error, InvalidArgument))
        except MillstreamError as error:
            raise NotAnswering(str(error)) from error
        return None

    def __str__(self) -> str:
        return without_password(self.uri)

    def __repr__(self) -> str:
        return f"RedisAddress({without_password(self.uri)!r})"


def no_second_password(uri: str | None, password_file: str | None) -> None:
    if uri is not None and password_file is not None and urlsplit(uri).password is not None:
        raise PydanticCustomError("uri", "give the password in the uri or in password_file, not in both")


def without_secrets(uri: str) -> str:
    """The URI without user and password."""
    return _PASSWORDS.sub("", _USERINFO.sub("", uri))


def database_at(uri: str) -> str:
    """The database that a URI names, equal for different spellings of the same one: with and without the default port
    or database, user and password. Only for comparisons."""
    plain = without_secrets(uri)
    parts = urlsplit(plain)
    if parts.scheme not in ("redis", "rediss") or parts.query or parts.hostname is None:
        return plain
    host = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname
    return f"{parts.scheme}://{host}:{parts.port or 6379}/{parts.path.strip('/') or '0'}"


def has_secret(uri: str) -> bool:
    parts = urlsplit(uri)
    return parts.password is not None or "password=" in parts.query


def without_password(uri: str) -> str:
    """The URI for display: with the user, without the password."""
    user, colon, _ = urlsplit(uri).netloc.rpartition("@")[0].partition(":")
    login = f"{user}:***" if colon else user
    return redacted(uri).replace("://***@", f"://{login}@", 1) if login else redacted(uri)


_PREFIX = "millstream-secrets-"


class SecretFiles:
    """URIs with a password, each in a file of mode 0600 in a directory of mode 0700, deleted with this object."""

    def __init__(self) -> None:
        self._directory: Path | None = None
        self._removal: weakref.finalize[..., SecretFiles] | None = None
        self._paths: dict[str, str] = {}

    def options(self, address: RedisAddress) -> dict[str, str]:
        """The options of the format ``redis_streams`` for an address, without secrets."""
        own = {} if address.password_file is None else {"passwordFile": address.password_file}
        if not has_secret(address.uri):
            return {"url": address.uri, **own}
        return {"urlFile": self.file(address.uri), **own}

    def close(self) -> None:
        if self._removal is not None:
            self._removal()
        self._directory, self._removal, self._paths = None, None, {}

    def file(self, uri: str) -> str:
        """The path of a file that contains this text."""
        if self._directory is None:
            _sweep()
            self._directory, lock = _locked_directory()
            self._removal = weakref.finalize(self, _remove, self._directory, lock)
        if uri not in self._paths:
            path = self._directory / f"{len(self._paths)}.uri"
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(uri)
            self._paths[uri] = str(path)
        return self._paths[uri]


def _locked_directory() -> tuple[Path, int]:
    """A new directory of mode 0700, and the descriptor whose lock keeps other processes from sweeping it.

    It gets the name that a sweep searches for only when it is locked.
    """
    made = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}{os.getpid()}-"))
    lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
    with contextlib.suppress(OSError):  # without locks on this file system, a sweep cannot lock it either
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return made.rename(made.with_name(made.name[1:])), lock


def _remove(directory: Path, lock: int) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    os.close(lock)


def _sweep() -> None:
    """Removes directories that killed processes of this user left.

    A process of another pid namespace that shares the temporary directory looks dead from here, so a directory is
    removed only if no process holds its lock.
    """
    for directory in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        pid = directory.name.removeprefix(_PREFIX).partition("-")[0]
        if not pid.isdigit() or Path("/proc", pid).exists() or not Path("/proc").is_dir():
            continue
        try:
            lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue  # another user's, or removed meanwhile
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
        except OSError:
            pass  # its owner is alive
        finally:
            os.close(lock)


def unreachable(addresses: Iterable[tuple[str, RedisAddress]], master: str) -> Iterator[tuple[str, str]]:
    """The addresses whose password cannot reach the executors of a cluster, which do not see this host's files."""
    if master.startswith("local"):
        return
    for where, address in addresses:
        if has_secret(address.uri):
            why = (
                f"the executors of {master} are other hosts, and the password in the uri of {address} must be on no "
                "command line. Write the password alone into a file of mode 0600 at the same path on every host, take "
                "it out of the uri, and give password_file: /the/path"
            )
            yield where, why


@contextmanager
def without_secret_variables(uris: Sequence[str]) -> Iterator[None]:
    """Removes the environment variables that contain one of these URIs or passwords, while children are started."""
    passwords = {unquote(password) for uri in uris if (password := urlsplit(uri).password)}
    hidden = {
        name: value for name, value in os.environ.items() if value in passwords or any(uri in value for uri in uris)
    }
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)
