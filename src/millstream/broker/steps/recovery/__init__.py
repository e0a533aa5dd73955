"""Deliveries that come again: what was abandoned, and what was put off and is due."""

from millstream.broker.steps.recovery.call import Due, Swept, Visit, needs_visit, sweep, take_due

__all__ = ["Due", "Swept", "Visit", "needs_visit", "sweep", "take_due"]
