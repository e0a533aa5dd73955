"""Aggregation of worker reports: sums, readiness, liveness."""

from __future__ import annotations

from random import Random
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from millstream.runner import fleet as fleet_module
from millstream.runner.fleet import SILENT_AFTER_S, UNRESTARTABLE_AFTER, Fleet
from millstream.runner.fleet_metrics import FleetCollector


class ManualTime:
    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


def report(ready: bool = True, **families: Any) -> dict[str, Any]:
    return {"ready": ready, "not_ready": [] if ready else ["bill on orders"], "topics": ["orders"], **families}


def acked(value: float, topic: str = "orders") -> list[Any]:
    labels = {"topic": topic, "group": "billing"}
    return ["millstream_messages_acked", "counter", "Text.", [["millstream_messages_acked_total", labels, value]]]


def gauge(value: float, name: str = "millstream_owned") -> list[Any]:
    return [name, "gauge", "Text.", [[name, {}, value]]]


def exposition(fleet: Fleet) -> str:
    registry = CollectorRegistry()
    registry.register(FleetCollector(fleet))
    return generate_latest(registry).decode()


def series(fleet: Fleet, name: str) -> list[str]:
    return [line for line in exposition(fleet).splitlines() if line.startswith(name)]


def two_workers() -> Fleet:
    fleet = Fleet(2, now=ManualTime())
    for number in (1, 2):
        fleet.worker_started(number, 1000 + number)
        fleet.worker_ready(number)
    return fleet


def test_counters_are_summed_over_workers() -> None:
    fleet = two_workers()
    fleet.worker_reported(1, report(families=[acked(5)]))
    fleet.worker_reported(2, report(families=[acked(7)]))
    assert series(fleet, "millstream_messages_acked_total") == [
        'millstream_messages_acked_total{group="billing",topic="orders"} 12.0'
    ]


def test_counter_keeps_what_a_dead_worker_counted_and_its_gauges_end() -> None:
    fleet = two_workers()
    fleet.worker_reported(1, report(families=[acked(5), gauge(3)]))
    fleet.worker_reported(2, report(families=[acked(7), gauge(4)]))
    assert series(fleet, "millstream_owned ") == ["millstream_owned 7.0"]
    fleet.worker_exited(1)
    fleet.worker_ended(1, died=True)
    assert series(fleet, "millstream_messages_acked_total")[0].endswith(" 12.0")
    assert series(fleet, "millstream_owned ") == ["millstream_owned 4.0"]
    fleet.worker_started(1, 2001)
    fleet.worker_reported(1, report(families=[acked(1)]))
    assert series(fleet, "millstream_messages_acked_total")[0].endswith(" 13.0")
    assert 'millstream_worker_starts_total{worker="1"} 2.0' in exposition(fleet)
    assert 'millstream_worker_deaths_total{worker="1"} 1.0' in exposition(fleet)


def test_counter_of_seconds_does_not_decrease_when_a_worker_ends() -> None:
    """Floats that are added in another order give another sum. Prometheus takes any decrease for a restart from zero,
    and counts everything again."""
    random = Random(1)
    fleet = Fleet(3, now=ManualTime())

    def seconds(value: float) -> list[Any]:
        name = "millstream_outage_seconds"
        return [name, "counter", "Text.", [[f"{name}_total", {}, value]]]

    def total() -> float:
        [line] = series(fleet, "millstream_outage_seconds_total")
        return float(line.split(" ")[1])

    counted = 0.0
    for _ in range(300):
        for number in (1, 2, 3):
            fleet.worker_started(number, 1000 + number)
            fleet.worker_reported(number, report(families=[seconds(random.uniform(0, 10))]))
        for number in (3, 2, 1):
            before = total()
            assert before >= counted
            fleet.worker_ended(number, died=True)
            counted = total()
            assert counted == before


def test_report_with_an_infinite_counter_leaves_the_sums_readable() -> None:
    fleet = two_workers()
    fleet.worker_reported(1, report(families=[acked(5)]))
    for value in (float("inf"), float("-inf"), float("nan")):
        fleet.worker_reported(2, report(families=[acked(value), gauge(value)]))
        assert series(fleet, "millstream_messages_acked_total")[0].endswith(" 5.0")
        fleet.worker_ended(2, died=True)
    assert series(fleet, "millstream_messages_acked_total")[0].endswith(" 5.0")


def test_histograms_are_summed_bucket_by_bucket_in_order() -> None:
    fleet = two_workers()

    def histogram(*counts: float) -> list[Any]:
        name = "millstream_publish_seconds"
        bounds = ["0.5", "10.0", "+Inf"]
        buckets = [[f"{name}_bucket", {"le": bound}, count] for bound, count in zip(bounds, counts, strict=True)]
        return [name, "histogram", "Text.", [*buckets, [f"{name}_count", {}, counts[-1]], [f"{name}_sum", {}, 1.5]]]

    fleet.worker_reported(1, report(families=[histogram(1, 2, 3)]))
    fleet.worker_reported(2, report(families=[histogram(0, 4, 4)]))
    assert series(fleet, "millstream_publish_seconds") == [
        'millstream_publish_seconds_bucket{le="0.5"} 1.0',
        'millstream_publish_seconds_bucket{le="10.0"} 6.0',
        'millstream_publish_seconds_bucket{le="+Inf"} 7.0',
        "millstream_publish_seconds_count 7.0",
        "millstream_publish_seconds_sum 3.0",
    ]


def test_gauges_of_streams_show_the_highest_worker() -> None:
    fleet = two_workers()
    fleet.worker_reported(1, report(families=[gauge(10, "millstream_retention_stream_length")]))
    fleet.worker_reported(2, report(families=[gauge(30, "millstream_retention_stream_length")]))
    assert series(fleet, "millstream_retention_stream_length ") == ["millstream_retention_stream_length 30.0"]


async def test_ready_only_when_every_worker_reads() -> None:
    fleet = two_workers()
    assert (await fleet.ready())[0]
    fleet.worker_reported(2, report(ready=False))
    is_ready, body = await fleet.ready()
    assert not is_ready
    assert body["not_ready"] == [{"name": "worker 2", "not_ready": ["bill on orders"]}]
    fleet.worker_reported(2, report())
    fleet.worker_exited(1)
    is_ready, body = await fleet.ready()
    assert body["not_ready"] == [{"name": "worker 1", "not_ready": ["is not running"]}]
    fleet.worker_ended(1, died=True)
    fleet.worker_started(1, 2001)
    assert not (await fleet.ready())[0]
    fleet.worker_ready(1)
    assert (await fleet.ready())[0]
    fleet.stop()
    assert not (await fleet.ready())[0]


async def test_worker_that_reports_nothing_is_not_ready() -> None:
    now = ManualTime()
    fleet = Fleet(1, now=now)
    fleet.worker_started(1, 1001)
    fleet.worker_reported(1, report())
    now.s += SILENT_AFTER_S
    assert fleet.is_ready
    now.s += 1
    assert not fleet.is_ready
    assert 'millstream_worker_up{worker="1"} 0.0' in exposition(fleet)
    assert (await fleet.health())[0], "its process runs: only a worker that cannot be restarted fails liveness"


async def test_liveness_fails_while_a_worker_cannot_be_restarted() -> None:
    fleet = two_workers()
    for _ in range(UNRESTARTABLE_AFTER):
        assert fleet.is_alive
        fleet.start_failed(1)
    is_alive, body = await fleet.health()
    assert not is_alive
    assert body["failed"] == [{"name": "worker 1", "failed_starts": UNRESTARTABLE_AFTER}]
    assert "millstream_failed 1.0" in exposition(fleet)
    fleet.worker_started(1, 2001)
    fleet.worker_ready(1)
    assert (await fleet.health())[0]


def test_malformed_report_is_ignored() -> None:
    fleet = two_workers()
    for bad in ({"families": [["x"]]}, {"ready": 1}, {"families": [["a", "counter", "t", [["a", None, 1]]]]}, {}):
        fleet.worker_reported(1, bad)
    assert fleet.is_ready
    exposition(fleet)


def test_series_beyond_the_limit_are_counted_together(monkeypatch: Any) -> None:
    monkeypatch.setattr(fleet_module, "MAX_SERIES", 2)
    fleet = Fleet(1, now=ManualTime())
    fleet.worker_started(1, 1001)
    for number in range(4):
        fleet.worker_reported(1, report(families=[acked(number + 1, f"t{number}")]))
    fleet.worker_exited(1)
    fleet.worker_ended(1, died=True)
    assert series(fleet, "millstream_messages_acked_total") == [
        'millstream_messages_acked_total{group="(other)",topic="(other)"} 7.0',
        'millstream_messages_acked_total{group="billing",topic="t0"} 1.0',
        'millstream_messages_acked_total{group="billing",topic="t1"} 2.0',
    ]
