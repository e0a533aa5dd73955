"""Redelivery: entries of dead consumers, and delayed entries that are due."""

from millstream.broker.scripts.recovery.call import Due, Swept, Visit, needs_visit, release, sweep, take_due

__all__ = ["Due", "Swept", "Visit", "needs_visit", "release", "sweep", "take_due"]
