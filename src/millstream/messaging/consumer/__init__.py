"""The consumer side of messaging. Topics of one group and consumer name share its parts, however many there are.

A reader receives entries (``reader``, ``shard``), workers run handlers (``worker_pool``), a settler applies their
outcomes, heartbeats keep entries owned (``heartbeat``), and a reclaimer claims abandoned ones. What may start next and
how much may be read is decided without I/O, in each topic's in-flight table and in ``capacity``.
docs/explain/a-message-is-handled.md walks a message through them.
"""

from millstream.messaging.consumer.subscriber import Subscriber

__all__ = ["Subscriber"]
