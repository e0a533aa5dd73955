"""Observer events become metrics: counted per message, bounded, and never raising into the caller."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from millstream.observe.metrics import OTHER
from millstream.observe.service_metrics import MEANINGS, Count, Level, ServiceMetrics, Time

SUBSCRIPTION = {"topic": "orders", "group": "billing", "consumer": "host-1"}
MEMBER = {"service": "sessions", "member": "redis-consumer-pod-7"}


class Observed:
    """Metrics, with a manual clock."""

    def __init__(self, **options: Any) -> None:
        self.registry = CollectorRegistry()
        self.now = 0.0
        self.metrics = ServiceMetrics(self.registry, now=lambda: self.now, **options)

    def __call__(self, name: str, /, **values: Any) -> None:
        self.metrics(name, **values)

    def value(self, metric: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"millstream_{metric}", labels)

    def text(self) -> str:
        return generate_latest(self.registry).decode()


def test_batch_counts_each_message() -> None:
    observed = Observed()
    observed("messaging.received", entries=50, **SUBSCRIPTION)
    observed("messaging.received", entries=7, **SUBSCRIPTION)
    observed("messaging.acked", entries=56, **SUBSCRIPTION)
    observed("messaging.dead_lettered", id="1-1", error="x", error_type="E", deliveries=5, **SUBSCRIPTION)
    labels = {"topic": "orders", "group": "billing"}
    assert observed.value("messages_received_total", **labels) == 57
    assert observed.value("messages_acked_total", **labels) == 56
    assert observed.value("messages_buried_total", **labels) == 1


def test_consumers_and_members_are_labels_only_on_request() -> None:
    plain, per_consumer = Observed(), Observed(per_consumer=True)
    for observed in (plain, per_consumer):
        observed("messaging.acked", entries=3, **SUBSCRIPTION)
        observed("assignment.renewed", leases=9, seconds=0.01, **MEMBER)
    assert "host-1" not in plain.text()
    assert "pod-7" not in plain.text()
    assert per_consumer.value("messages_acked_total", **SUBSCRIPTION) == 3
    assert per_consumer.value("assignment_leases_extended_total", **MEMBER) == 9


def test_published_messages_their_bytes_and_their_time() -> None:
    observed = Observed()
    observed("messaging.published", topic="orders", messages=100, bytes=8500, seconds=0.002)
    observed("messaging.published_unique", topic="orders", messages=1, skipped=2)
    observed("messaging.publish_failed", topic="orders", messages=4, error_type="BrokerUnavailable")
    assert observed.value("messages_published_total", topic="orders") == 101
    assert observed.value("messages_published_bytes_total", topic="orders") == 8500
    assert observed.value("messages_deduplicated_total", topic="orders") == 2
    assert observed.value("publish_seconds_count", topic="orders") == 1
    assert observed.value("publish_failures_total", topic="orders", error_type="BrokerUnavailable") == 4


def test_leases_are_counted_and_timed() -> None:
    observed = Observed()
    observed("assignment.claimed", tried=3, won=2, seconds=0.004, **MEMBER)
    for stream in ("s1", "s2", "s3"):
        observed("assignment.taken", stream=stream, taken_from="", **MEMBER)
    observed.now = 20.0
    observed("assignment.finished", stream="s1", **MEMBER)
    observed("assignment.released", streams=["s2", "never-taken"], **MEMBER)
    observed("assignment.disowned", stream="s3", **MEMBER)
    observed("assignment.started", streams=2, seconds=0.3, **MEMBER)
    service = {"service": "sessions"}
    assert observed.value("assignment_claim_attempts_total", **service) == 3
    assert observed.value("assignment_leases_acquired_total", **service) == 2
    assert observed.value("assignment_claim_duration_seconds_count", **service) == 1
    assert observed.value("assignment_leases_released_total", **service) == 2
    assert observed.value("assignment_startup_recovery_streams", **service) == 2
    for ended in ("finished", "released", "disowned"):
        assert observed.value("assignment_stream_processing_seconds_sum", ended=ended, **service) == 20.0
    assert not observed.metrics._owned_since, "released streams are removed"


def test_texts_of_errors_never_become_labels() -> None:
    observed = Observed(per_consumer=True)
    secret = "redis://user:s3cret@host"
    carried = {"topic": "t", "group": "g", "consumer": "c", "stream": "s", "handler": "h", "error_type": "E"}
    numbers = {"entries": 1, "messages": 1, "bytes": 1, "seconds": 0.1, "skipped": 0, "outputs": 0, "dropped": 1}
    numbers |= {"length": 1, "undelivered": 1, "unacked": 1, "tried": 1, "won": 1, "leases": 1}
    for name in MEANINGS:
        streams: Any = ["s"] if name == "assignment.released" else 1
        error = {"error": "E" if name == "messaging.handled" else secret}
        texts = {"reason": secret, "id": secret, "patterns": [secret], "point": secret, "taken_from": secret}
        observed(
            name, **carried, **numbers, **MEMBER, **error, **texts, streams=streams, step="place", kind="StreamAdded"
        )
    assert not observed.metrics._logged_errors
    assert "s3cret" not in observed.text()


def test_hostile_topics_are_escaped_and_bounded() -> None:
    observed = Observed(max_series=10)
    hostile = 'x"} 1\nmillstream_fake_total{a="\x1b]0;owned\x07'
    observed("messaging.received", topic=hostile, group="g", consumer="c", entries=1)
    for number in range(1000):
        observed("messaging.received", topic=f"made-up-{number}", group="g", consumer="c", entries=1)
    text = observed.text()
    assert "\x1b" not in text
    assert not [line for line in text.splitlines() if line.startswith("millstream_fake_total")]
    assert len([line for line in text.splitlines() if line.startswith("millstream_messages_received_total{")]) == 11
    assert observed.value("messages_received_total", topic=OTHER, group=OTHER) == 991


def test_failing_observer_event_is_logged_once_and_ignored(caplog: pytest.LogCaptureFixture) -> None:
    observed = Observed()
    with caplog.at_level(logging.ERROR, "millstream.observe"):
        observed("messaging.acked", **SUBSCRIPTION)
        observed("messaging.acked", **SUBSCRIPTION)
    assert len(caplog.records) == 1


def test_events_of_other_packages_are_ignored() -> None:
    observed = Observed()
    before = observed.text()
    observed("pipeline.batch", pipeline="p", events=1)
    observed("another.event", anything=object())
    assert observed.text() == before


def test_alert_table_is_consistent() -> None:
    """One name has one kind, one text and one set of labels, and follows the naming rules of Prometheus."""
    received: dict[str, tuple[type, str, tuple[str, ...]]] = {}
    for meaning in itertools.chain.from_iterable(MEANINGS.values()):
        shape = (type(meaning), meaning.text, meaning.labels)
        assert received.setdefault(meaning.metric, shape) == shape
        match meaning:
            case Count():
                assert meaning.metric.endswith("_total")
            case Time():
                assert meaning.metric.endswith("_seconds")
            case Level():
                assert not meaning.metric.endswith("_total")
