"""What CONFIG GET shows and CONFIG SET may change."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from millstream.engine.engine import Engine


class Config:
    __slots__ = ("_engine", "stream_node_max_bytes", "stream_node_max_entries")

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.stream_node_max_bytes = 4096
        self.stream_node_max_entries = 100
