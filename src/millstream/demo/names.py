"""The demo's streams. They share a hash tag, so that a handler's output and its acknowledgement are one atomic step."""

from __future__ import annotations

TABLES = ("customers", "orders", "payments")
GROUP = "fulfilment"
POISON = "poison"


def topics(tag: str) -> list[str]:
    return [f"{tag}.{table}" for table in TABLES]


def results(tag: str) -> str:
    """Where workers put what they have done."""
    return f"{tag}.done"
