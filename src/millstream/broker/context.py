"""What an operation may use of its broker (limits, settings, caches; never a connection), and ``BrokerProtocol``.

``Limits`` holds every bound of the broker: the size of an entry, the commands in flight, the waiting times.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from millstream.broker.scripts.script import Fence
from millstream.broker.transport.interface import KeyWatch
from millstream.errors import InvalidArgument
from millstream.model import Clock, Observer, SystemClock, quiet
from millstream.model.policies import guarded
from millstream.wire import Operation

MIB = 1024 * 1024
MAX_ARGS_PER_ROW = 7000
"""Names and values of one entry that a script can pass to a command: Lua's ``unpack`` has a limit."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a broker, with safe defaults: ``open_broker(url, limits=Limits(max_entry_bytes=...))``."""

    max_entry_bytes: int = 64 * MIB
    """All names and values of one entry together. Redis accepts 512 MiB per value, which is too large for a stream."""
    max_atomic_bytes: int = 256 * MIB
    """The size of one MULTI/EXEC: the server keeps all of it in memory before it executes anything."""
    chunk_commands: int = 1000
    """The number of commands of a batch that are packed and sent as one chunk."""
    chunk_bytes: int = 512 * 1024
    """A chunk also ends at this size, so that large entries do not fill the socket buffers of both sides."""
    chunks_ahead: int = 16
    """The number of chunks in flight: enough to keep the server busy while the next chunk is packed."""
    script_entries: int = 1000
    """The number of entries in one call of an appending script, because a script blocks all other clients while it
    runs.
    """
    script_bytes: int = 4 * MIB
    connect_ms: int = 5_000
    """The time for opening one connection, including the handshake."""
    answer_ms: int = 5_000
    """How long to wait for a reply, in addition to the command's ``block_ms``. Then the connection counts as broken."""
    idle_check_ms: int = 30_000
    """A connection that was idle for longer is checked with a PING before the next command is sent on it."""
    max_idle_connections: int = 16
    """Idle connections that are kept for blocking commands and for threads; more are opened on demand and closed after
    use.
    """
    listen_backlog: int = 10_000
    """The number of messages that a listener buffers; then the oldest are dropped, and an observer event is emitted."""


DEFAULT_LIMITS = Limits()


@dataclass(slots=True)
class Context:
    """The settings and caches of one open broker. Operations receive it as first argument; ``Context()`` has the
    defaults.
    """

    max_stream_len: int | None = None
    """Trim streams safely to about this length; None: do not trim."""
    hard_max_stream_len: int | None = None
    """Trim streams to about this length even if groups still need the entries; None: never trim needed entries."""
    observer: Observer = quiet
    clock: Clock = field(default_factory=SystemClock)
    limits: Limits = DEFAULT_LIMITS
    fence: Fence | None = None
    """The owner record that fenced writes compare; None: writes are not fenced."""
    cluster: bool = False
    """Whether the keys are distributed over several nodes."""
    node_of: Callable[[bytes], Hashable] | None = None
    """On a cluster: the node of a key, as far as known. Keys of one node are unavailable at the same time."""
    watch_keys: Callable[[], KeyWatch] | None = None
    """On a cluster: makes a watch of keys for the running event loop. None: writes are not reported."""
    until_trim: dict[bytes, int] = field(default_factory=dict)
    """Stream to the number of entries to add before it is trimmed again."""
    durability_seen: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Slot (0 without a cluster) to when the server's durability settings were read, and what they were."""

    def __post_init__(self) -> None:
        self.observer = guarded(self.observer)

    def refuse_unfenced(self, method: str) -> None:
        """Rejects a method that cannot compare the owner record.

        On a fenced broker it would write without the fence, and a stale owner could use it unnoticed.
        """
        if self.fence is not None:
            allowed = "xadd, xack or a subscriber with it, or the original broker for writes that need no fence"
            raise InvalidArgument("fence", method, allowed)


P = ParamSpec("P")
R = TypeVar("R")
OperationFunction = Callable[Concatenate[Context, P], Operation[R]]
"""A function that takes the context and its arguments and returns an operation."""


class BrokerProtocol(Protocol):
    """What ``Router``, ``Publisher``, ``Subscriber``, ``CommandBus`` and ``EventBus`` need of a broker.

    They call only ``run``. A fake in a test can therefore count operations, refuse some of them, delay them, or pass
    them on to an embedded broker.
    """

    @property
    def context(self) -> Context:
        """The limits, the clock and the observer. ``Context()`` has the defaults."""

    @property
    def transport(self) -> object:
        """Compared, never called: brokers with the same transport use the same server and share their readers."""

    def run(self, operation: OperationFunction[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Awaitable[R]:
        """Runs the operation ``operation(context, *args, **kwargs)`` and returns its result.

        ``operation.__name__`` is its name: ``xreadgroup``, ``ack_held``, or ``command_pipeline`` for several operations
        in one round trip. Raises what the operation raises.
        """
