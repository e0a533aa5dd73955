"""What an operation may know of the broker it runs for: its limits, settings and small memories, never a connection;
and what handlers, publishers and buses need of a broker, as a type.

Every bound of the broker stands here: how much an entry holds, how far a batch runs ahead, how long one waits.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from millstream.broker.steps.script import Guard
from millstream.errors import InvalidArgument
from millstream.model import Clock, Observer, SystemClock, quiet
from millstream.wire import Conversation

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


@dataclass(slots=True)
class Context:
    """One for each open broker. Operations receive it first; tests make one with no arguments."""

    max_stream_len: int | None = None
    """Keep streams about this short by safe trim; None leaves them alone."""
    hard_max_stream_len: int | None = None
    """Never much longer than this, whatever groups still need; None: groups come first."""
    observer: Observer = quiet
    clock: Clock = field(default_factory=SystemClock)
    limits: Limits = DEFAULT_LIMITS
    guard: Guard | None = None
    """The owner record behind which deliveries are settled; None: whoever holds a delivery may settle it."""
    cluster: bool = False
    """Keys live on several nodes."""
    node_of: Callable[[bytes], Hashable] | None = None
    """On a cluster: which node has a key, as far as is known. What shares a node shares its outages."""
    until_trim: dict[bytes, int] = field(default_factory=dict)
    """Stream to the number of adds that are left until it is trimmed again."""
    durability_seen: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Slot (0 off a cluster) to when the server's durability was read, and what it was."""

    def refuse_unfenced(self, what: str) -> None:
        """For writes that compare no owner record. Behind a guard they are refused: whoever asked for a fence and got
        none would learn of it from the entries of a stale owner."""
        if self.guard is not None:
            allowed = "xadd, xack or a subscriber behind it, or the broker itself where nothing is to be fenced"
            raise InvalidArgument("guard", what, allowed)


P = ParamSpec("P")
R = TypeVar("R")
Step = Callable[Concatenate[Context, P], Conversation[R]]
"""One thing that a broker can do: from what it may know and its arguments to a conversation with a server."""


class BrokerProtocol(Protocol):
    """``Router``, ``Publisher``, ``Subscriber``, ``CommandBus`` and ``EventBus`` take whatever has these three.

    Everything that messaging asks of a broker is a step, and a step is run by ``run``. So people's own stand-ins in
    tests may count the steps, refuse some of them, answer late, or pass them on to an embedded broker.
    """

    @property
    def context(self) -> Context:
        """Limits, clock, and the observer that is told facts. ``Context()`` is one with defaults."""

    @property
    def link(self) -> object:
        """Compared, never called: brokers over the same link are the same place, and their readers are shared."""

    def run(self, step: Step[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Awaitable[R]:
        """Holds the conversation ``step(context, *args, **kwargs)`` and returns its result. ``step.__name__`` tells
        what is asked: ``xreadgroup``, ``ack_held``, ``together`` for several at once. Raises what the step raises."""
