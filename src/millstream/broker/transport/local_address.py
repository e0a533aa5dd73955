"""The embedded brokers of this process: shared by all transports with the same name or directory, closed with
the last.
"""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path
from typing import Literal, NamedTuple, cast
from urllib.parse import parse_qsl, unquote, urlsplit

from millstream.broker.embedded import Embedded
from millstream.broker.transport.targets import redacted
from millstream.engine import Session
from millstream.errors import BrokerClosed, InvalidArgument
from millstream.model import Clock, parse_size_bytes

Policy = Literal["always", "everysec", "no"]
LOCAL_FORMS = (
    "local://, local://name or local:///path, the last with ?appendfsync=always, everysec or no, each with "
    "?maxmemory=512mb or another size"
)


class LocalAddress(NamedTuple):
    """A parsed local:// URL. ``path`` is the real path of a directory, or empty for a broker in memory called
    ``name``.
    """

    name: str
    path: str
    appendfsync: Policy | None = None
    maxmemory: int | None = None
    """In bytes: while more is used, writes that need memory raise OutOfMemory. None: no limit."""

    @property
    def key(self) -> tuple[str, str]:
        return self.name, self.path


def address_of(url: str) -> LocalAddress:
    parts = urlsplit(url)
    if parts.scheme != "local" or not url.startswith("local://") or (parts.netloc and parts.path.strip("/")):
        raise InvalidArgument("url", redacted(url), LOCAL_FORMS)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    maxmemory = parse_size_bytes(options.pop("maxmemory"), "maxmemory") if "maxmemory" in options else None
    policy = options.pop("appendfsync", None)
    path = unquote(parts.path)
    in_memory = path in ("", "/")
    if options or policy not in (None, "always", "everysec", "no") or (in_memory and policy) or path == "/":
        raise InvalidArgument("url", redacted(url), LOCAL_FORMS)
    if in_memory:
        return LocalAddress(unquote(parts.netloc), "", None, maxmemory)
    return LocalAddress("", os.path.realpath(path), cast("Policy | None", policy), maxmemory)


class _Shared:
    """An embedded broker, and the number of its handles."""

    def __init__(self) -> None:
        self.handles = 0
        self.opening = threading.Lock()
        self.embedded: Embedded | None = None
        self.appendfsync: Policy | None = None
        self.maxmemory: int | None = None


_shared: dict[tuple[str, str], _Shared] = {}
_guard = threading.RLock()
"""Reentrant, because the garbage collector can finalize a forgotten handle while the same thread holds it."""


def _forget_all() -> None:
    """In a forked child: forgets all brokers, which belong to the parent."""
    global _guard  # noqa: PLW0603  # another thread of the parent may have held it during the fork
    _guard = threading.RLock()
    for shared in _shared.values():
        shared.opening = threading.Lock()
    _shared.clear()


os.register_at_fork(after_in_child=_forget_all)


class Handle:
    """One user of an embedded broker. It counts as open immediately, and opens files on first use."""

    def __init__(self, address: LocalAddress, clock: Clock) -> None:
        self._address = address
        self._clock = clock
        with _guard:
            self._shared = _shared.setdefault(address.key, _Shared())
            self._shared.handles += 1
        self.closed = False
        self._session: Session | None = None
        self._release = weakref.finalize(self, _release, address.key, self._shared)

    @property
    def durable(self) -> bool:
        return bool(self._address.path)

    def open(self) -> tuple[Embedded, Session]:
        """The broker, and this handle's session for commands that do not wait. Blocks while a journal is loaded."""
        with self._shared.opening:
            if self.closed:
                raise BrokerClosed("this broker was closed. Open another one with open_broker(url).")
            if self._shared.embedded is None:
                self._shared.embedded = self._create()
                self._shared.appendfsync = self._address.appendfsync or "everysec"
                self._shared.maxmemory = self._address.maxmemory
            else:
                self._check_option("appendfsync", self._address.appendfsync, self._shared.appendfsync)
                self._check_option("maxmemory", self._address.maxmemory, self._shared.maxmemory)
            embedded = self._shared.embedded
        if self._session is None:
            self._session = embedded.session()
        return embedded, self._session

    def _check_option(self, name: str, requested: str | int | None, current: str | int | None) -> None:
        if requested not in (None, current):
            raise InvalidArgument("url", f"{name}={requested}", f"{current!r}, with which it is open already")

    def _create(self) -> Embedded:
        address = self._address
        if address.path:
            policy = address.appendfsync or "everysec"
            embedded = Embedded(directory=Path(address.path), appendfsync=policy, clock=self._clock)
        else:
            embedded = Embedded(clock=self._clock)
        if address.maxmemory is not None:
            embedded.set_maxmemory(address.maxmemory)
        return embedded

    def close(self) -> None:
        self.closed = True
        session, self._session = self._session, None
        embedded = self._shared.embedded
        if session is not None and embedded is not None and not embedded.closed:
            embedded.drop(session)
        self._release()


def _release(key: tuple[str, str], shared: _Shared) -> None:
    with _guard:
        shared.handles -= 1
        last = shared.handles == 0
        if last and _shared.get(key) is shared:
            del _shared[key]
    if last:
        # Wait for a thread that is opening it: if it stayed open, its directory would stay locked.
        with shared.opening:
            if shared.embedded is not None:
                shared.embedded.close()
