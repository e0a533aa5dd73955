"""Messages that are published later: kept beside their stream, and moved into it when they are due."""

from millstream.broker.steps.delayed.call import publish_due, publish_later

__all__ = ["publish_due", "publish_later"]
