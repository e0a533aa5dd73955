"""A Grafana dashboard with a panel for every metric that the code has, in rows by subject."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from prometheus_client.registry import Collector, CollectorRegistry

from millstream.observe.format import escape

WIDTH: Final = 24
HEIGHT: Final = 8
PANELS_PER_ROW: Final = 3


class MetricFamily(NamedTuple):
    """A metric as it is exposed: a counter's name ends in ``_total``."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


def collectors_of(registry: CollectorRegistry) -> list[Collector]:
    """The registered collectors: for a metric without series, only its collector has the names of its labels."""
    return list(registry._collector_to_names)


def families_of(collectors: Iterable[Collector]) -> list[MetricFamily]:
    """Every metric of millstream, with or without series."""
    families = set()
    for collector in collectors:
        for family in collector.collect():
            if family.name.startswith("millstream_"):
                name = f"{family.name}_total" if family.type == "counter" else family.name
                labels = getattr(collector, "_labelnames", None) or getattr(family, "_labelnames", None) or ()
                families.add(MetricFamily(name, family.type, tuple(labels), family.documentation))
    return sorted(families)


ROWS: Final = (
    ("Readiness and workers", ("ready", "failed", "worker_")),
    ("Streams and groups", ("stream_", "survey_", "server_")),
    ("Messages", ("messages_", "handler_", "acks_", "subscription", "route_")),
    ("Publishing", ("publish", "outage")),
    ("Assignment", ("assignment_",)),
    ("Retention", ("retention_",)),
    (
        "Pipelines: sources and batches",
        ("source_", "batch_", "checkpoints_", "last_", "e2e_", "late_", "pipeline_", "slot_"),
    ),
    ("Pipelines: processors and sinks", ("processor_", "stage_", "sink_", "dlq_")),
)
"""A panel belongs to the first row that has a prefix of its metric's name, and otherwise to the last row."""
LAST_ROW: Final = "Consumers and broker"
_UNITS: Final = {"seconds": "s", "bytes": "bytes", "ratio": "percentunit"}


def dashboard(families: Sequence[MetricFamily]) -> dict[str, Any]:
    """The dashboard as Grafana imports it. The first row is open, the others are collapsed."""
    rows: dict[str, list[MetricFamily]] = {title: [] for title in (*dict(ROWS), LAST_ROW)}
    for family in families:
        rows[row_of(family)].append(family)
    panels: list[dict[str, Any]] = []
    y = 0
    number = iter(range(1, 10_000))
    for title, members in rows.items():
        is_open = not panels
        row = {"id": next(number), "type": "row", "title": title, "collapsed": not is_open, "panels": []}
        row["gridPos"] = {"x": 0, "y": y, "w": WIDTH, "h": 1}
        inside = [_panel(next(number), family, at, y + 1) for at, family in enumerate(members)]
        panels.append(row)
        if is_open:
            panels += inside
        else:
            row["panels"] = inside
        y += 1 + (HEIGHT * -(-len(members) // PANELS_PER_ROW) if is_open else 0)
    return {
        "title": "millstream",
        "uid": "millstream",
        "schemaVersion": 39,
        "version": 1,
        "tags": ["millstream"],
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": list(_variables())},
        "panels": panels,
    }


def _variables() -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}
    yield {
        "name": "job",
        "type": "query",
        "label": "Job",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": {"query": 'label_values({__name__=~"millstream_.*"}, job)', "refId": "job"},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
    }


def row_of(family: MetricFamily) -> str:
    name = family.name.removeprefix("millstream_")
    return next((title for title, prefixes in ROWS if name.startswith(prefixes)), LAST_ROW)


def expressions_of(family: MetricFamily) -> list[tuple[str, str]]:
    """The queries of a metric's panel, and the legend of each.

    Labels that only ``per_consumer`` adds are left out: a panel shows a service, not its processes.
    """
    labels = [name for name in family.labels if name not in ("consumer", "member")]
    legend = " ".join(f"{{{{{name}}}}}" for name in labels) or "{{job}}"
    by = f"by ({', '.join(labels or ['job'])})"
    series = f'{family.name}{{job=~"$job"}}'
    if family.kind == "counter":
        return [(f"sum {by} (rate({series}[$__rate_interval]))", legend)]
    if family.kind == "histogram":
        buckets = f'{family.name}_bucket{{job=~"$job"}}'
        with_bound = f"by ({', '.join(['le', *(labels or ['job'])])})"
        return [
            (f"histogram_quantile({share}, sum {with_bound} (rate({buckets}[$__rate_interval])))", f"{name} {legend}")
            for share, name in ((0.5, "p50"), (0.99, "p99"))
        ]
    return [(f"max {by} ({series})", legend)]


def _panel(number: int, family: MetricFamily, at: int, y: int) -> dict[str, Any]:
    width = WIDTH // PANELS_PER_ROW
    name = family.name.removeprefix("millstream_")
    ending = name.removesuffix("_total").rpartition("_")[2]
    unit = "ops" if family.kind == "counter" and ending not in _UNITS else _UNITS.get(ending, "short")
    if family.kind == "counter" and ending == "bytes":
        unit = "Bps"
    return {
        "id": number,
        "type": "timeseries",
        "title": name,
        "description": "".join(char if char.isprintable() else escape(char) for char in family.text),
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": {
            "x": at % PANELS_PER_ROW * width,
            "y": y + at // PANELS_PER_ROW * HEIGHT,
            "w": width,
            "h": HEIGHT,
        },
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend}
            for index, (expression, legend) in enumerate(expressions_of(family))
        ],
    }
