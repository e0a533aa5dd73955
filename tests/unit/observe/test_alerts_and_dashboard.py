"""Alert rules and dashboard: they name metrics and labels that exist, and there is a panel for every metric."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from millstream.cli.main import build
from millstream.cli.observe import DASHBOARD, RULES, metric_families
from millstream.errors import InvalidArgument
from millstream.observe.alerts import alert_rules
from millstream.observe.grafana import dashboard

PROMETHEUS_LABELS = {"job", "instance", "le"}
FAMILIES = {family.name: family for family in metric_families()}
SAMPLES = {
    f"{name}{ending}": family
    for name, family in FAMILIES.items()
    for ending in (("_bucket", "_sum", "_count") if family.kind == "histogram" else ("",))
}
RULE_EXPRESSIONS = {rule["alert"]: rule["expr"] for group in alert_rules()["groups"] for rule in group["rules"]}


def panels() -> list[dict[str, object]]:
    all_panels = []
    for panel in dashboard(metric_families())["panels"]:
        all_panels += panel["panels"] if panel["type"] == "row" else [panel]
    return all_panels


def panel_expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]  # type: ignore[attr-defined]


@pytest.mark.parametrize("expression", [*RULE_EXPRESSIONS.values(), *panel_expressions()])
def test_expression_names_metrics_and_labels_that_exist(expression: str) -> None:
    names = re.findall(r"\bmillstream_\w+", expression)
    assert names
    assert not [name for name in names if name not in SAMPLES]
    known = PROMETHEUS_LABELS.union(*(SAMPLES[name].labels for name in names))
    groupings = [label.strip() for part in re.findall(r"by \(([^)]*)\)", expression) for label in part.split(",")]
    selectors = re.findall(r"[{,](\w+)=", expression)
    assert not [label for label in (*groupings, *selectors) if label not in known]


@pytest.mark.parametrize("rule", alert_rules()["groups"][0]["rules"], ids=lambda rule: rule["alert"])
def test_alert_names_only_labels_that_its_expression_keeps(rule: dict[str, object]) -> None:
    annotations = rule["annotations"]
    assert isinstance(annotations, dict)
    used = set(re.findall(r"\$labels\.(\w+)", " ".join(annotations.values())))
    for part in re.findall(r"by \(([^)]*)\)", str(rule["expr"])):
        assert used <= {label.strip() for label in part.split(",")}
    assert annotations["description"].endswith(".")


def test_every_cause_that_an_operator_must_know_has_an_alert() -> None:
    assert len(RULE_EXPRESSIONS) == len(set(RULE_EXPRESSIONS))
    wanted = ("LagGrows", "ConsumerDied", "DeadLetters", "PipelineFailed", "SinkQueueFull", "MemoryNearLimit")
    wanted += ("LeaseFlapping", "NotReady")
    assert {f"Millstream{name}" for name in wanted} <= RULE_EXPRESSIONS.keys()


def test_dashboard_has_a_panel_for_every_metric_and_no_id_twice() -> None:
    in_panels = {name for expression in panel_expressions() for name in re.findall(r"\bmillstream_\w+", expression)}
    assert {SAMPLES[name].name for name in in_panels} == set(FAMILIES)
    rows = [panel for panel in dashboard(metric_families())["panels"] if panel["type"] == "row"]
    numbers = [panel["id"] for panel in (*panels(), *rows)]
    assert len(numbers) == len(set(numbers))


def test_page_lists_every_alert() -> None:
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "alerts.md").read_text()
    assert sorted(re.findall(r"^\| `(Millstream\w+)`", page, re.M)) == sorted(RULE_EXPRESSIONS)


def test_known_metrics_are_those_of_the_reference() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "metrics.md").read_text()
    assert set(re.findall(r"^\| `(millstream_\w+)`", page, re.M)) == set(FAMILIES)


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(build(["observe"]), ["observe", "export", *arguments])
    if isinstance(done.exception, InvalidArgument):
        return 2, str(done.exception)
    return done.exit_code, done.output


def test_export_writes_files_and_keeps_those_that_were_changed(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "monitoring"
    assert run("--to", str(directory))[0] == 0
    assert yaml.safe_load((directory / RULES).read_text()) == alert_rules()
    assert json.loads((directory / DASHBOARD).read_text()) == dashboard(metric_families())
    assert run("--to", str(directory))[0] == 0, "nothing was changed"
    (directory / RULES).write_text("groups: []\n")
    code, text = run("--to", str(directory))
    assert code == 2
    assert RULES in text
    assert DASHBOARD not in text
    assert (directory / RULES).read_text() == "groups: []\n"
    assert run("--to", str(directory), "--force")[0] == 0
    assert yaml.safe_load((directory / RULES).read_text()) == alert_rules()
