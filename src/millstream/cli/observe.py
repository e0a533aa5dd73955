"""``millstream observe``: alert rules and a dashboard as files, for Prometheus and Grafana."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millstream.errors import InvalidArgument

if TYPE_CHECKING:
    from millstream.observe.grafana import MetricFamily

app = typer.Typer()

RULES = "millstream-rules.yml"
DASHBOARD = "millstream-dashboard.json"
HEADER = "# Alert rules for Prometheus, written by `millstream observe export`. Thresholds are yours to change.\n"


@app.callback()
def observe() -> None:
    """Files for Prometheus and Grafana, made from the metrics that this version has."""


@app.command()
def export(
    to: Annotated[Path, typer.Option("--to", help="The directory; it is created if it does not exist.")],
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that were changed.")] = False,
) -> None:
    """Write the alert rules and the Grafana dashboard into a directory."""
    import yaml

    from millstream.observe.alerts import alert_rules
    from millstream.observe.grafana import dashboard

    rules = HEADER + yaml.safe_dump(alert_rules(), sort_keys=False, width=120)
    texts = {RULES: rules, DASHBOARD: json.dumps(dashboard(metric_families()), indent=2) + "\n"}
    to.mkdir(parents=True, exist_ok=True)
    if not force:
        changed = [name for name, text in texts.items() if _differs(to / name, text)]
        if changed:
            raise InvalidArgument("--to", str(to), f"--force, to overwrite {' and '.join(changed)} with other content")
    for name, text in texts.items():
        (to / name).write_text(text, encoding="utf-8")
        typer.echo(str(to / name))


def _differs(path: Path, text: str) -> bool:
    return path.exists() and path.read_bytes() != text.encode()


def metric_families() -> list[MetricFamily]:
    """Every metric of services, of ``millstream run`` and of pipelines."""
    from millstream.observe.grafana import families_of

    return families_of(_collectors())


def _collectors() -> Iterator[Any]:
    from prometheus_client import CollectorRegistry

    from millstream.broker import open_broker
    from millstream.observe import PipelineMetrics, ServiceMonitor, StreamStatsCollector
    from millstream.observe.grafana import collectors_of
    from millstream.runner.fleet import fleet_collector

    monitor = ServiceMonitor(port=None, per_consumer=True)
    pipelines = CollectorRegistry()
    PipelineMetrics(pipelines)
    yield from collectors_of(monitor.registry)
    yield from collectors_of(pipelines)
    yield StreamStatsCollector(open_broker("local://metrics"), ["*"], per_consumer=True)
    yield fleet_collector(1)
