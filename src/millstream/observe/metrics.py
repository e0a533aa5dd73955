"""Metrics for Prometheus from facts: a registry, and observers that turn facts of their room into series.

Told facts, never asking. A room's observer takes the facts it knows and ignores all others, so that several can hang
on one stream of facts. Label values are data: Prometheus's own exposition escapes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Generic, Protocol, Self, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from millstream.model import Observer
from millstream.wire import to_bytes

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


MAX_LABEL = 120
MAX_SERIES = 500
OTHER = "(other)"
"""The label of everything for which there was no room."""


def label(value: object) -> str:
    """The name, readable and harmless: control characters and bytes that are not UTF-8 as escapes, long ones cut.

    A cut name ends in a digest of the whole: two long names that begin alike stay two.
    """
    name = "" if value is None else str(value)
    if len(name) <= MAX_LABEL and name.isprintable():
        return name
    escaped = "".join(char if char.isprintable() else _escape(char) for char in name)
    if len(escaped) <= MAX_LABEL:
        return escaped
    return f"{escaped[: MAX_LABEL - 17]}~{blake2b(to_bytes(name), digest_size=8).hexdigest()}"


def _escape(char: str) -> str:
    code = ord(char)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that was not UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


class Labelled(Protocol):
    """A metric of prometheus-client."""

    def labels(self, *values: str) -> Self: ...


M = TypeVar("M", bound=Labelled)


class Series(Generic[M]):
    """A metric whose labels are taken from facts by name. Remembers its children, for a fact costs a lookup then."""

    def __init__(self, metric: M, names: Sequence[str], *, max_series: int = MAX_SERIES) -> None:
        self._metric = metric
        self._names = tuple(names)
        self._max_series = max_series
        self._children: dict[tuple[Any, ...], M] = {}
        self._other: M | None = None

    def of(self, facts: Mapping[str, Any]) -> M:
        """The child for these facts; a label that they do not have is empty."""
        values = tuple([facts.get(name) for name in self._names])
        child = self._children.get(values)
        return self._add(values) if child is None else child

    def _add(self, values: tuple[Any, ...]) -> M:
        if not self._names:
            child = self._metric
        elif len(self._children) < self._max_series:
            child = self._metric.labels(*map(label, values))
        else:
            # Not remembered: else whoever makes names up would fill our memory instead of Prometheus's.
            self._other = self._other or self._metric.labels(*[OTHER] * len(self._names))
            return self._other
        self._children[values] = child
        return child
