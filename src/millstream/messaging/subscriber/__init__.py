"""The subscriber. Topics of one group and consumer name share their parts, however many there are.

Readers wait for them (``reader``, ``shard``), workers handle, a settler settles, a heartbeat keeps (``membership``) and
a sweeper brings back. What is decided is decided purely, in each topic's ``book`` and in ``room``.
docs/explain/a-message-is-handled.md walks a message through them.
"""

from millstream.messaging.subscriber.subscriber import Subscriber

__all__ = ["Subscriber"]
