"""Our own server for tests, on a thread of this process."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from millstream.broker import Embedded
from millstream.server import Server


class ServedBroker:
    """An embedded broker that others can reach at ``url`` while the block lasts."""

    def __init__(self, *, password: str | None = None) -> None:
        self._password = password
        self.embedded = Embedded(password=password.encode() if password else None)
        self.server = Server(self.embedded, port=0)

    @property
    def port(self) -> int:
        return self.server.port

    @property
    def url(self) -> str:
        login = f":{self._password}@" if self._password else ""
        return f"redis://{login}127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self.server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.server.stop()
        self.embedded.close()
