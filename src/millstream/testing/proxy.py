"""A TCP proxy that cuts connections, in the middle of a reply where that is asked for: what networks do."""

from __future__ import annotations

import asyncio
import random
from types import TracebackType
from typing import Self


class CuttingProxy:
    """``async with CuttingProxy(port) as proxy``: clients connect to ``proxy.url``.

    Every piece of a reply is the last one of its connection with probability ``chance``; of that piece only a part is
    delivered. ``cuts`` counts. The same seed makes the same choices, as far as the network's timing allows.
    """

    def __init__(self, port: int, *, host: str = "127.0.0.1", chance: float = 0.0, seed: int = 0) -> None:
        self._host = host
        self._port = port
        self.chance = chance
        self.cuts = 0
        self._random = random.Random(seed)  # noqa: S311  # repeatable, not secret
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def port(self) -> int:
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.cut_all()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut_all(self) -> None:
        """Every connection that is open now, as a crash does it: no goodbye."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            server_reader, server_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, server_writer}
        try:
            await asyncio.gather(
                self._forward(reader, server_writer, may_cut=False), self._forward(server_reader, writer, may_cut=True)
            )
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            for one in (writer, server_writer):
                self._writers.discard(one)
                one.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, may_cut: bool) -> None:
        while piece := await reader.read(65536):
            if may_cut and self.chance and self._random.random() < self.chance:
                self.cuts += 1
                writer.write(piece[: self._random.randrange(len(piece))])
                await writer.drain()
                raise ConnectionResetError("planted")
            writer.write(piece)
            await writer.drain()
        raise ConnectionResetError("the other side closed")
