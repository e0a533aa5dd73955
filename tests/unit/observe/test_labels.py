"""Labels: control characters are escaped, long names are cut, and the number of series is bounded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from millstream.observe.metrics import MAX_LABEL, OTHER, Series, label
from millstream.wire.commands import to_name


def test_plain_names_stay_as_they_are() -> None:
    assert label("orders.eu-1") == "orders.eu-1"
    assert label("größe 東京 {a}") == "größe 東京 {a}"
    assert label(None) == ""


def test_control_characters_and_invalid_utf8_are_escaped() -> None:
    assert label("a\x1b[31mred\nb") == r"a\x1b[31mred\x0ab"
    assert label(to_name(b"caf\xe9")) == r"caf\xe9"
    assert label("a\u202eb") == r"a\u202eb"


def test_long_names_are_cut_and_stay_different() -> None:
    first, second = label("x" * 5000 + "1"), label("x" * 5000 + "2")
    assert len(first) == len(second) == MAX_LABEL
    assert first != second
    assert first == label("x" * 5000 + "1")


@given(st.binary(max_size=300))
def test_any_name_survives_the_exposition(raw: bytes) -> None:
    registry = CollectorRegistry()
    Counter("seen_total", "Seen.", ["topic"], registry=registry).labels(label(to_name(raw))).inc()
    text = generate_latest(registry).decode()
    assert all(line.isprintable() for line in text.split("\n"))
    (sample,) = [s for f in text_string_to_metric_families(text) for s in f.samples if s.name == "seen_total"]
    assert sample.labels == {"topic": label(to_name(raw))}


def test_series_beyond_the_maximum_are_counted_together_and_not_stored() -> None:
    registry = CollectorRegistry()
    names = ["topic", "group"]
    series = Series(Counter("seen_total", "Seen.", names, registry=registry), names, max_series=3)
    for number in range(100):
        series.of({"topic": f"t{number}", "group": "g"}).inc()
        series.of({"topic": "t1", "group": "g"}).inc()
    samples = {
        sample.labels["topic"]: sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "seen_total"
    }
    assert samples == {"t0": 1, "t1": 101, "t2": 1, OTHER: 97}
    assert len(series._children) == 3


def test_label_without_a_field_in_the_event_is_empty() -> None:
    registry = CollectorRegistry()
    names = ["topic", "group"]
    Series(Counter("seen_total", "Seen.", names, registry=registry), names).of({"topic": "t"}).inc()
    assert registry.get_sample_value("seen_total", {"topic": "t", "group": ""}) == 1
