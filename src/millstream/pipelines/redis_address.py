"""The Redis servers that a spec names: checked early, never shown with their password, and handed to Spark without it.

Spark shows a query's options in plans, logs, its UI and its event log, its settings on the JVM's command line, and its
environment to every child. So Spark is told the path of a file that only its user reads, and each process that connects
reads the rest there.
"""

from __future__ import annotations

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
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import unquote, urlsplit

from pydantic import AfterValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from millstream.broker import redacted, target_of
from millstream.errors import AuthenticationFailed, InvalidArgument, MillstreamError, PermissionDenied

if TYPE_CHECKING:
    from millstream import BlockingBroker

log = logging.getLogger("millstream.pipelines")
_PING_MS = 2_000
SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")
# Greedy: a password may hold an @ that nobody quoted.
_USERINFO = re.compile(r"(?<=://)[^/?#]*@")
_PASSWORDS = re.compile(r"(?<=[?&])[a-z_]*password=[^&]*")


def _checked(text: str) -> str:
    scheme = text.partition("://")[0]
    if scheme == "local":
        why = (
            "local:// lives in one process, and Spark's workers are others; start `millstream serve`, name its redis://"
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
    """The server at an address of a spec does not answer now."""

    retryable = True


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """A Redis that a spec names. ``password_file`` holds its password, and is read by every process that connects."""

    uri: str
    password_file: str | None = None

    def open(self, **settings: Any) -> BlockingBroker:
        """A broker for this process. Close it."""
        from millstream import open_blocking_broker

        return open_blocking_broker(self.url(), **settings)

    def url(self) -> str:
        """Where to connect to, secrets included. Never log it."""
        from millstream.spark import Address

        return Address(self.uri, password_file=self.password_file).resolve()

    def refusal(self) -> str | None:
        """Why this address will never work; None where it does. Raises NotAnswering where it may yet."""
        try:
            with self.open(deadline_ms=_PING_MS) as broker:
                broker.ping()
        except (AuthenticationFailed, PermissionDenied, InvalidArgument) as error:
            return f"{self}: {type(error).__name__}: {error}"
        except MillstreamError as error:
            raise NotAnswering(str(error)) from error
        return None

    def __str__(self) -> str:
        return shown(self.uri)

    def __repr__(self) -> str:
        return f"RedisAddress({shown(self.uri)!r})"


def no_second_password(uri: str | None, password_file: str | None) -> None:
    if uri is not None and password_file is not None and urlsplit(uri).password is not None:
        raise PydanticCustomError("uri", "give the password in the uri or in password_file, not in both")


def without_secrets(uri: str) -> str:
    """The URI with whoever connects, and with what password, left out."""
    return _PASSWORDS.sub("", _USERINFO.sub("", uri))


def has_secret(uri: str) -> bool:
    parts = urlsplit(uri)
    return parts.password is not None or "password=" in parts.query


def shown(uri: str) -> str:
    """The URI for people: the user stays, the password does not."""
    user, colon, _ = urlsplit(uri).netloc.rpartition("@")[0].partition(":")
    login = f"{user}:***" if colon else user
    return redacted(uri).replace("://***@", f"://{login}@", 1) if login else redacted(uri)


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
