"""What to subscribe to where, and what comes back: the part of listening that has no I/O in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millstream.broker.links.nodes import Node
from millstream.wire.commands import Args

NODE_LOCAL = b"__key"
"""Keyspace and keyevent channels: in a cluster each node tells of its own keys only."""


def subscriptions(patterns: Sequence[bytes], primaries: Sequence[Node]) -> dict[Node, Args]:
    """One PSUBSCRIBE for each node. Ordinary messages travel to all nodes, so that one of them is enough;

    listening for them everywhere would bring each message once for every node.
    """
    local = [pattern for pattern in patterns if pattern.startswith(NODE_LOCAL)]
    common = [pattern for pattern in patterns if not pattern.startswith(NODE_LOCAL)]
    wanted: dict[Node, Args] = {}
    for index, node in enumerate(primaries):
        here = [*local, *(common if index == 0 else ())]
        if here:
            wanted[node] = (b"PSUBSCRIBE", *here)
    return wanted


def message_of(reply: Any) -> tuple[bytes, bytes] | None:
    """(channel, payload), or None for what merely confirms."""
    if isinstance(reply, list) and len(reply) == 4 and reply[0] == b"pmessage":
        return reply[2], reply[3]
    return None


def confirms(reply: Any) -> bool:
    return isinstance(reply, list) and len(reply) == 3 and reply[0] == b"psubscribe"
