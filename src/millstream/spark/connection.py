"""The server's address and login, pickled to the tasks without secrets: each process that connects reads them.

There is one broker for each address and process. Spark reuses Python workers for several tasks, so their connections
are reused too."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote, urlsplit, urlunsplit

from millstream.broker import BlockingBroker, Limits, open_blocking_broker
from millstream.broker.context import DEFAULT_LIMITS
from millstream.broker.transport.targets import redacted
from millstream.errors import AuthenticationFailed, BrokerUnavailable, TLSFailed
from millstream.spark.errors import InvalidOption

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_SCHEMES = (
    *("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel"),
    *("redis+cluster", "rediss+cluster"),
)


@dataclass(frozen=True, slots=True, repr=False)
class Address:
    """Pickles unresolved: each process resolves ``${NAME}``, ``urlFile``, ``passwordFile`` and ``passwordEnv``. With
    ``url_file`` the ``url`` is empty."""

    url: str
    username: str | None = None
    password_file: str | None = None
    password_env: str | None = None
    deadline_ms: int = 60_000
    connect_ms: int = DEFAULT_LIMITS.connect_ms
    answer_ms: int = DEFAULT_LIMITS.answer_ms
    url_file: str | None = None

    @property
    def description(self) -> str:
        return redacted(self.url) if self.url_file is None else f"the url in {self.url_file}"

    def resolve(self, environment: Mapping[str, str] = os.environ) -> str:
        """The URL to connect to, secrets included. Never log it."""
        if self.url_file is not None:
            url = _read_secret("urlFile", self.url_file)
        else:
            url = _VARIABLE.sub(lambda match: _variable(match[1], environment, self.url), self.url)
        _check(url)
        password = self._password(environment)
        if self.username is None and password is None:
            return url
        parts = urlsplit(url)
        login, _, host = parts.netloc.rpartition("@")
        user, colon, secret = login.partition(":")
        if self.username is not None:
            user = quote(self.username, safe="")
        if password is not None:
            colon, secret = ":", quote(password, safe="")
        return urlunsplit(parts._replace(netloc=f"{user}{colon}{secret}@{host}"))

    def _password(self, environment: Mapping[str, str]) -> str | None:
        if self.password_env is not None:
            return _variable(self.password_env, environment, "passwordEnv")
        return None if self.password_file is None else _read_secret("passwordFile", self.password_file)

    def __repr__(self) -> str:
        return f"Address({self.description!r})"


def _read_secret(option: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, ValueError) as error:
        allowed = f"a file that the driver and every executor can read, at the same path on each host ({error})"
        raise InvalidOption(option, path, allowed) from None


def address_from(
    url: str | None,
    *,
    username: str | None,
    password_file: str | None,
    password_env: str | None,
    deadline_ms: int,
    connect_ms: int = DEFAULT_LIMITS.connect_ms,
    answer_ms: int = DEFAULT_LIMITS.answer_ms,
    url_file: str | None = None,
) -> Address:
    """Validates what does not depend on the environment variables of a process."""
    if url is not None and url_file is not None:
        raise InvalidOption("urlFile", url_file, "only one of url and urlFile")
    if password_file is not None and password_env is not None:
        raise InvalidOption("passwordFile", password_file, "only one of passwordFile and passwordEnv")
    if url_file is not None:
        url = ""
    elif url is None:
        url = "${MILLSTREAM_URL}"
    elif not _VARIABLE.search(url):
        _check(url)
    return Address(url, username, password_file, password_env, deadline_ms, connect_ms, answer_ms, url_file)


def _variable(name: str, environment: Mapping[str, str], source: str) -> str:
    value = environment.get(name)
    if value:
        return value
    if source == "${MILLSTREAM_URL}":
        raise InvalidOption("url", None, "an address such as redis://localhost:6379, or set MILLSTREAM_URL")
    raise InvalidOption(
        "passwordEnv" if source == "passwordEnv" else "url",
        f"${{{name}}}",
        f"an environment variable that is set; {name} must be set on the driver and on every executor",
    )


def _check(url: str) -> None:
    scheme, separator, _ = url.partition("://")
    if scheme == "local":
        raise InvalidOption(
            "url",
            redacted(url),
            "a server: Spark's tasks are other processes and cannot reach an embedded broker. "
            "Start a server with `millstream serve` and use its redis:// address",
        )
    if not separator or scheme not in _SCHEMES:
        raise InvalidOption(
            "url", redacted(url), "an address that begins with " + ", ".join(f"{s}://" for s in _SCHEMES)
        )


_open: dict[tuple[int, str, int, Limits], BlockingBroker] = {}
_connected: set[BlockingBroker] = set()


def broker_at(address: Address, *, script_entries: int = DEFAULT_LIMITS.script_entries) -> BlockingBroker:
    """The process's broker for this address. Secrets are resolved each time, so that a changed password is used."""
    limits = replace(
        DEFAULT_LIMITS, script_entries=script_entries, connect_ms=address.connect_ms, answer_ms=address.answer_ms
    )
    key = (os.getpid(), address.resolve(), address.deadline_ms, limits)
    broker = _open.get(key)
    if broker is None:
        # Only the sink's own options trim a stream.
        broker = _open[key] = open_blocking_broker(
            key[1], deadline_ms=address.deadline_ms, limits=limits, max_stream_len=None
        )
    return broker


def connected_broker(address: Address) -> BlockingBroker:
    """``broker_at``, after a PING. The PING is sent once for each address and process.

    A connection error is raised here, before any data is read or written, and names the option.
    """
    broker = broker_at(address)
    if broker in _connected:
        return broker
    try:
        broker.ping()
    except BrokerUnavailable as error:
        raise BrokerUnavailable(f"option url: {address.description} does not reply. {error}") from error
    except TLSFailed as error:
        raise TLSFailed(f"option url: {address.description} cannot be reached over TLS. {error}") from error
    except AuthenticationFailed as error:
        names = "url, urlFile, username, passwordFile or passwordEnv"
        raise AuthenticationFailed(f"options {names}: {address.description} refused the login. {error}") from error
    _connected.add(broker)
    return broker
