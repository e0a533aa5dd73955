"""Facts go in, figures come out: nothing is asked, and nothing that is told can stop the teller."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from millstream.observe.metrics import OTHER
from millstream.observe.service_metrics import MEANINGS, Count, Level, ServiceMetrics, Time

SUBSCRIPTION = {"topic": "orders", "group": "billing", "consumer": "host-1"}
MEMBER = {"service": "sessions", "member": "redis-consumer-pod-7"}


class Told:
    """Metrics, with a clock that is turned by hand."""

    def __init__(self, **options: Any) -> None:
        self.registry = CollectorRegistry()
        self.now = 0.0
        self.metrics = ServiceMetrics(self.registry, now=lambda: self.now, **options)

    def __call__(self, name: str, /, **facts: Any) -> None:
        self.metrics(name, **facts)

    def value(self, metric: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"millstream_{metric}", labels)

    def text(self) -> str:
        return generate_latest(self.registry).decode()


def test_a_batch_counts_for_what_it_holds() -> None:
    told = Told()
    told("messaging.received", entries=50, **SUBSCRIPTION)
    told("messaging.received", entries=7, **SUBSCRIPTION)
    told("messaging.acked", entries=56, **SUBSCRIPTION)
    told("messaging.buried", id="1-1", error="x", error_type="E", deliveries=5, **SUBSCRIPTION)
    labels = {"topic": "orders", "group": "billing"}
    assert told.value("messages_received_total", **labels) == 57
    assert told.value("messages_acked_total", **labels) == 56
    assert told.value("messages_buried_total", **labels) == 1


def test_consumers_and_members_are_labels_only_on_request() -> None:
    plain, asked = Told(), Told(per_consumer=True)
    for told in (plain, asked):
        told("messaging.acked", entries=3, **SUBSCRIPTION)
        told("assignment.renewed", leases=9, seconds=0.01, **MEMBER)
    assert "host-1" not in plain.text()
    assert "pod-7" not in plain.text()
    assert asked.value("messages_acked_total", **SUBSCRIPTION) == 3
    assert asked.value("assignment_leases_extended_total", **MEMBER) == 9


def test_published_messages_their_bytes_and_their_time() -> None:
    told = Told()
    told("messaging.published", topic="orders", messages=100, bytes=8500, seconds=0.002)
    told("messaging.published_unique", topic="orders", messages=1, skipped=2)
    told("messaging.publish_failed", topic="orders", messages=4, error_type="BrokerUnavailable")
    assert told.value("messages_published_total", topic="orders") == 101
    assert told.value("messages_published_bytes_total", topic="orders") == 8500
    assert told.value("messages_deduplicated_total", topic="orders") == 2
    assert told.value("publish_seconds_count", topic="orders") == 1
    assert told.value("publish_failures_total", topic="orders", error_type="BrokerUnavailable") == 4


def test_the_life_of_a_lease() -> None:
    told = Told()
    told("assignment.claimed", tried=3, won=2, seconds=0.004, **MEMBER)
    for stream in ("s1", "s2", "s3"):
        told("assignment.taken", stream=stream, taken_from="", **MEMBER)
    told.now = 20.0
    told("assignment.finished", stream="s1", **MEMBER)
    told("assignment.released", streams=["s2", "never-taken"], **MEMBER)
    told("assignment.disowned", stream="s3", **MEMBER)
    told("assignment.started", streams=2, seconds=0.3, **MEMBER)
    service = {"service": "sessions"}
    assert told.value("assignment_claim_attempts_total", **service) == 3
    assert told.value("assignment_leases_acquired_total", **service) == 2
    assert told.value("assignment_claim_duration_seconds_count", **service) == 1
    assert told.value("assignment_leases_released_total", **service) == 2
    assert told.value("assignment_startup_recovery_streams", **service) == 2
    for ended in ("finished", "released", "disowned"):
        assert told.value("assignment_stream_processing_seconds_sum", ended=ended, **service) == 20.0
    assert not told.metrics._owned_since, "what is not owned any more is forgotten"


def test_texts_of_errors_never_become_labels() -> None:
    told = Told(per_consumer=True)
    secret = "redis://user:s3cret@host"
    carried = {"topic": "t", "group": "g", "consumer": "c", "stream": "s", "handler": "h", "error_type": "E"}
    numbers = {"entries": 1, "messages": 1, "bytes": 1, "seconds": 0.1, "skipped": 0, "outputs": 0, "dropped": 1}
    numbers |= {"length": 1, "undelivered": 1, "unacked": 1, "tried": 1, "won": 1, "leases": 1}
    for name in MEANINGS:
        streams: Any = ["s"] if name == "assignment.released" else 1
        error = {"error": "E" if name == "messaging.handled" else secret}
        texts = {"reason": secret, "id": secret, "patterns": [secret], "point": secret, "taken_from": secret}
        told(name, **carried, **numbers, **MEMBER, **error, **texts, streams=streams, step="place", kind="StreamAdded")
    assert not told.metrics._complained
    assert "s3cret" not in told.text()


def test_hostile_topics_are_escaped_and_bounded() -> None:
    told = Told(max_series=10)
    hostile = 'x"} 1\nmillstream_fake_total{a="\x1b]0;owned\x07'
    told("messaging.received", topic=hostile, group="g", consumer="c", entries=1)
    for number in range(1000):
        told("messaging.received", topic=f"made-up-{number}", group="g", consumer="c", entries=1)
    text = told.text()
    assert "\x1b" not in text
    assert not [line for line in text.splitlines() if line.startswith("millstream_fake_total")]
    assert len([line for line in text.splitlines() if line.startswith("millstream_messages_received_total{")]) == 11
    assert told.value("messages_received_total", topic=OTHER, group=OTHER) == 991


def test_a_fact_that_cannot_be_counted_stops_nobody_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    told = Told()
    with caplog.at_level(logging.ERROR, "millstream.observe"):
        told("messaging.acked", **SUBSCRIPTION)
        told("messaging.acked", **SUBSCRIPTION)
    assert len(caplog.records) == 1


def test_facts_of_other_rooms_are_ignored() -> None:
    told = Told()
    before = told.text()
    told("pipeline.batch", pipeline="p", events=1)
    told("somebody.elses", anything=object())
    assert told.text() == before


def test_the_table_is_consistent() -> None:
    """One name has one kind, one text and one set of labels, and is spelt as Prometheus wants it."""
    seen: dict[str, tuple[type, str, tuple[str, ...]]] = {}
    for meaning in (one for meanings in MEANINGS.values() for one in meanings):
        shape = (type(meaning), meaning.text, meaning.labels)
        assert seen.setdefault(meaning.metric, shape) == shape
        match meaning:
            case Count():
                assert meaning.metric.endswith("_total")
            case Time():
                assert meaning.metric.endswith("_seconds")
            case Level():
                assert not meaning.metric.endswith("_total")
