"""Deliveries that come again: what was abandoned, and what was put off and is due."""

from millstream.broker.steps.recovery.call import Due, Swept, sweep, take_due

__all__ = ["Due", "Swept", "sweep", "take_due"]
