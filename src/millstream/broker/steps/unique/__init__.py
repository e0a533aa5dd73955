"""Appending unless the event id was seen before, for rows that have no stable order."""

from millstream.broker.steps.unique.call import append_unique

__all__ = ["append_unique"]
