"""Deliveries that come again: what was abandoned, and what was put off and is due."""
