"""Every bound of the broker in one place: how much an entry holds, how far a batch runs ahead, how long one waits."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1024 * 1024
ROW_WORDS = 7000
"""Names and values of one entry in a script, which cannot take more apart at a time."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Safe by default. Pass your own to ``open_broker(url, limits=Limits(max_entry_bytes=...))``."""

    max_entry_bytes: int = 64 * MIB
    """Names and values of one entry together. Redis takes 512 MiB a value; a stream of such entries helps nobody."""
    max_atomic_bytes: int = 256 * MIB
    """What one MULTI/EXEC may carry: the server holds all of it in memory before it begins."""
    chunk_commands: int = 1000
    """A batch travels in chunks of so many commands."""
    chunk_bytes: int = 512 * 1024
    """A chunk ends here too, so that big entries do not fill both sides' socket buffers."""
    chunks_ahead: int = 16
    """Chunks that may be under way unanswered: enough to keep the server busy while the next is packed."""
    script_entries: int = 1000
    """Entries in one call of an appending script: a script holds up everybody else while it runs."""
    script_bytes: int = 4 * MIB
    connect_ms: int = 5_000
    """Opening one connection, the handshake included."""
    answer_ms: int = 5_000
    """Silence after a command was sent, beyond its ``block_ms``. After that the connection counts as broken."""
    idle_check_ms: int = 30_000
    """A connection that was idle for longer is asked for a sign of life before a command is trusted to it."""
    max_idle_connections: int = 16
    """Connections kept for blocking commands and for threads; more are opened when needed and closed after use."""
    listen_backlog: int = 10_000
    """Messages that a listener may fall behind; then the oldest are dropped, and the observer is told."""


DEFAULT_LIMITS = Limits()
