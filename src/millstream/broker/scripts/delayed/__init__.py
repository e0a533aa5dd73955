"""Delayed messages: stored next to their stream, and published when they are due."""

from millstream.broker.scripts.delayed.call import publish_due, publish_later

__all__ = ["publish_due", "publish_later"]
