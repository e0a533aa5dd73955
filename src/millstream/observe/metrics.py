"""Metrics for Prometheus from facts: a registry, and observers that turn facts of their room into series.

Told facts, never asking. A room's observer takes the facts it knows and ignores all others, so that several can hang
on one stream of facts. Label values are data: Prometheus's own exposition escapes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from millstream.model import Observer

LATENCY_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Exposition:
    """A registry of its own, not the process's: two services in one process do not share series."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

    def text(self) -> bytes:
        return generate_latest(self.registry)


def together(observers: Sequence[Observer]) -> Observer:
    """One observer that tells all of them."""

    def observer(name: str, /, **facts: Any) -> None:
        for one in observers:
            one(name, **facts)

    return observer
