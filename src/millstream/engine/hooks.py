"""What the engine asks of its driver: the journal, the process, the network. All of it is optional."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


def _nothing() -> Mapping[str, object]:
    return {}


@dataclass(slots=True)
class Hooks:
    rewrite_journal: Callable[[], None] | None = None
    """BGREWRITEAOF: start a rewrite. Raises ErrorReply when one is under way."""
    reload_journal: Callable[[], None] | None = None
    """DEBUG LOADAOF: write what is outstanding, empty the engine and load it from the journal."""
    configure: Callable[[str, str], None] | None = None
    """CONFIG SET of a parameter that the driver acts on (``appendfsync``, ``maxclients``), after it was checked."""
    server: Callable[[], Mapping[str, object]] = _nothing
    """Lines for INFO's section: tcp_port, process_id, run_id, uptime_in_seconds, ..."""
    clients: Callable[[], Mapping[str, object]] = _nothing
    memory: Callable[[], Mapping[str, object]] = _nothing
    persistence: Callable[[], Mapping[str, object]] = _nothing
    stats: Callable[[], Mapping[str, object]] = _nothing
    cpu: Callable[[], Mapping[str, object]] = _nothing
