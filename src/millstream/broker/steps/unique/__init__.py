"""Appending unless the event id was seen before, for rows that have no stable order."""

from millstream.broker.steps.unique.call import DAY_MS, append_unique

__all__ = ["DAY_MS", "append_unique"]
