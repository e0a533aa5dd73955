"""The embedded brokers of this process: shared by all who open the same name or directory, gone with the last one."""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path
from typing import Literal, NamedTuple, cast
from urllib.parse import parse_qsl, unquote, urlsplit

from millstream.broker.embedded import Embedded
from millstream.broker.links.targets import redacted
from millstream.engine import Session
from millstream.errors import BrokerClosed, InvalidArgument
from millstream.model import Clock, parse_size_bytes

Policy = Literal["always", "everysec", "no"]
LOCAL_FORMS = (
    "local://, local://name or local:///path, the last with ?appendfsync=always, everysec or no, each with "
    "?maxmemory=512mb or another size"
)


class LocalAddress(NamedTuple):
    """``path`` is the real path of a directory, or empty for what lives in memory under ``name``."""

    name: str
    path: str
    appendfsync: Policy | None = None
    maxmemory: int | None = None
    """In bytes: writes that would add are refused with OutOfMemory while more is used. None: no limit."""

    @property
    def place(self) -> tuple[str, str]:
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
    """One embedded broker, and how many handles it has."""

    def __init__(self) -> None:
        self.handles = 0
        self.opening = threading.Lock()
        self.embedded: Embedded | None = None
        self.appendfsync: Policy | None = None
        self.maxmemory: int | None = None


_shared: dict[tuple[str, str], _Shared] = {}
_guard = threading.RLock()
"""Taken again by its own thread where the collector finds a forgotten handle in the middle of the work."""


def _forget_all() -> None:
    """In a forked child nothing is open: what the parent has is the parent's."""
    global _guard  # noqa: PLW0603  # the parent's may have been held while it forked
    _guard = threading.RLock()
    for mine in _shared.values():
        mine.opening = threading.Lock()
    _shared.clear()


os.register_at_fork(after_in_child=_forget_all)


class Handle:
    """One opener's hold on an embedded broker. It counts from the start, and opens files on first use."""

    def __init__(self, address: LocalAddress, clock: Clock) -> None:
        self._address = address
        self._clock = clock
        with _guard:
            self._mine = _shared.setdefault(address.place, _Shared())
            self._mine.handles += 1
        self.closed = False
        self._session: Session | None = None
        self._release = weakref.finalize(self, _let_go, address.place, self._mine)

    @property
    def durable(self) -> bool:
        return bool(self._address.path)

    def open(self) -> tuple[Embedded, Session]:
        """The broker, and this handle's session for what does not wait. Blocks while a journal is read."""
        with self._mine.opening:
            if self.closed:
                raise BrokerClosed("this broker was closed. Open another one with open_broker(url).")
            if self._mine.embedded is None:
                self._mine.embedded = self._make()
                self._mine.appendfsync = self._address.appendfsync or "everysec"
                self._mine.maxmemory = self._address.maxmemory
            else:
                self._agree("appendfsync", self._address.appendfsync, self._mine.appendfsync)
                self._agree("maxmemory", self._address.maxmemory, self._mine.maxmemory)
            embedded = self._mine.embedded
        if self._session is None:
            self._session = embedded.session()
        return embedded, self._session

    def _agree(self, name: str, wanted: str | int | None, given: str | int | None) -> None:
        if wanted not in (None, given):
            raise InvalidArgument("url", f"{name}={wanted}", f"{given!r}, as it is open already")

    def _make(self) -> Embedded:
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
        embedded = self._mine.embedded
        if session is not None and embedded is not None and not embedded.closed:
            embedded.drop(session)
        self._release()


def _let_go(place: tuple[str, str], mine: _Shared) -> None:
    with _guard:
        mine.handles -= 1
        last = mine.handles == 0
        if last and _shared.get(place) is mine:
            del _shared[place]
    if last:
        # Whoever is opening it at this moment ends first: left open, it would keep its directory locked for ever.
        with mine.opening:
            if mine.embedded is not None:
                mine.embedded.close()
