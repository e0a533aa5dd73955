"""The exported files against Prometheus's own tool: the rules parse, and each alert fires for its cause."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from typer.testing import CliRunner

from millstream.cli.main import build
from millstream.cli.observe import DASHBOARD, RULES
from millstream.observe.alerts import alert_rules

pytestmark = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: apt-get install prometheus)"
)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("monitoring")
    done = CliRunner().invoke(build(["observe"]), ["observe", "export", "--to", str(directory)])
    assert done.exit_code == 0, done.output
    return directory


def promtool(*words: str) -> str:
    done = subprocess.run(["promtool", *words], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_rules_pass_the_check(exported: Path) -> None:
    assert f"{len(alert_rules()['groups'][0]['rules'])} rules found" in promtool(
        "check", "rules", str(exported / RULES)
    )


def test_expressions_of_the_dashboard_parse(exported: Path, tmp_path: Path) -> None:
    """Prometheus parses an expression as the expression of a recording rule."""
    panels = json.loads((exported / DASHBOARD).read_text())["panels"]
    panels += [panel for row in panels for panel in row.get("panels", ())]
    expressions = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    assert len(expressions) > 100
    rules = [
        {"record": f"panel:{number}", "expr": text.replace("$__rate_interval", "5m").replace("$job", ".*")}
        for number, text in enumerate(expressions)
    ]
    path = tmp_path / "panels.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    promtool("check", "rules", str(path))


class Cause(NamedTuple):
    """``series`` from minute 0 on, a value per minute; the alert fires at ``minute`` with these labels."""

    alert: str
    series: dict[str, str]
    minute: int
    labels: dict[str, str]


GROUP = '{stream="orders",group="billing"}'
READ = '{topic="orders",group="billing"}'
JOB = '{job="shop",instance="a:9100"}'
OF_GROUP = {"stream": "orders", "group": "billing"}
OF_READ = {"topic": "orders", "group": "billing"}
OF_JOB = {"job": "shop", "instance": "a:9100"}
CAUSES = (
    Cause("LagGrows", {f"millstream_stream_group_lag{GROUP}": "0+50x40"}, 30, OF_GROUP),
    Cause("MessageStuck", {f"millstream_stream_group_oldest_pending_seconds{GROUP}": "0+60x40"}, 30, OF_GROUP),
    Cause(
        "NoConsumer",
        {f"millstream_stream_group_lag{GROUP}": "5x40", f"millstream_stream_group_consumers{GROUP}": "0x40"},
        *(10, OF_GROUP),
    ),
    Cause("ConsumerDied", {f"millstream_messages_claimed_total{READ}": "0x10 3x40"}, 12, OF_READ),
    Cause("ConsumerDied", {f"millstream_messages_claimed_total{READ}": "_x10 3x40"}, 12, OF_READ),
    Cause(
        "WorkerDown",
        {'millstream_worker_up{job="shop",instance="a:9100",worker="2"}': "1x5 0x40"},
        *(10, {**OF_JOB, "worker": "2"}),
    ),
    Cause(
        "WorkerRestarts",
        {'millstream_worker_deaths_total{job="shop",instance="a:9100",worker="2"}': "0+1x40"},
        *(15, {**OF_JOB, "worker": "2"}),
    ),
    Cause(
        "NotReady",
        {'millstream_ready{job="shop",instance="a:9100",what="router"}': "1x5 0x40"},
        *(12, {**OF_JOB, "what": "router"}),
    ),
    Cause("Failed", {f"millstream_failed{JOB}": "0x5 1x40"}, 10, OF_JOB),
    Cause("DeadLetters", {f"millstream_messages_buried_total{READ}": "7x10 8x40"}, 12, OF_READ),
    Cause("DeadLetters", {f"millstream_messages_buried_total{READ}": "_x10 1x40"}, 12, OF_READ),
    Cause("PublishFailed", {'millstream_publish_failures_total{topic="orders"}': "_x10 1x40"}, 12, {"topic": "orders"}),
    Cause("UnreadEntriesDropped", {f"millstream_retention_lost_undelivered_total{GROUP}": "_x10 9x40"}, 12, OF_GROUP),
    Cause("UnreadEntriesDropped", {f"millstream_broker_lost_undelivered_total{GROUP}": "1x10 9x40"}, 12, OF_GROUP),
    Cause(
        "MemoryNearLimit",
        {f"millstream_server_memory_bytes{JOB}": "95x40", f"millstream_server_memory_limit_bytes{JOB}": "100x40"},
        *(10, {"job": "shop"}),
    ),
    Cause("BrokerUnreachable", {f"millstream_survey_up{JOB}": "1x5 0x40"}, 10, OF_JOB),
    Cause(
        "LeaseFlapping",
        {'millstream_assignment_streams_disowned_total{service="ingest"}': "0+1x40"},
        *(15, {"service": "ingest"}),
    ),
    Cause(
        "PipelineFailed",
        {'millstream_pipeline_status{pipeline="cdc",state="failed"}': "0x5 1x40"},
        *(6, {"pipeline": "cdc"}),
    ),
    Cause("PipelineDeadLetters", {'millstream_dlq_events_total{pipeline="cdc"}': "_x10 4x40"}, 12, {"pipeline": "cdc"}),
    Cause(
        "SinkQueueFull",
        {'millstream_sink_dropped_batches_total{pipeline="cdc",sink="lake"}': "0x10 1x40"},
        *(12, {"pipeline": "cdc", "sink": "lake"}),
    ),
    Cause(
        "SinkBehind",
        {'millstream_sink_spooled_batches{pipeline="cdc",sink="lake"}': "2x40"},
        *(30, {"pipeline": "cdc", "sink": "lake"}),
    ),
)
QUIET = {
    f"millstream_stream_group_lag{GROUP}": "90x60",
    f"millstream_stream_group_consumers{GROUP}": "2x60",
    f"millstream_stream_group_oldest_pending_seconds{GROUP}": "3x60",
    f"millstream_messages_claimed_total{READ}": "3x60",
    f"millstream_messages_buried_total{READ}": "7x60",
    'millstream_worker_up{job="shop",instance="a:9100",worker="1"}': "1x30 0 1x60",
    'millstream_worker_deaths_total{job="shop",instance="a:9100",worker="1"}': "0x30 1x60",
    'millstream_ready{job="shop",instance="a:9100",what="router"}': "1x30 0 1x60",
    f"millstream_failed{JOB}": "0x60",
    f"millstream_server_memory_bytes{JOB}": "95x60",  # without a limit
    f"millstream_survey_up{JOB}": "1x60",
    'millstream_pipeline_status{pipeline="cdc",state="failed"}': "0x60",
    'millstream_sink_spooled_batches{pipeline="cdc",sink="lake"}': "2x8 0 2x8 0 2x8 0 2x8 0 2x8 0",
    'millstream_assignment_streams_disowned_total{service="ingest"}': "0x30 2x60",
}


def unit_test(series: dict[str, str], checks: list[dict[str, Any]]) -> dict[str, Any]:
    inputs = [{"series": name, "values": values} for name, values in series.items()]
    return {"interval": "1m", "input_series": inputs, "alert_rule_test": checks}


def expected(name: str, labels: dict[str, str], minute: int) -> dict[str, Any]:
    [rule] = [rule for rule in alert_rules()["groups"][0]["rules"] if rule["alert"] == name]
    alert = {"exp_labels": {**labels, **rule["labels"]}}
    return {"eval_time": f"{minute}m", "alertname": name, "exp_alerts": [alert]}


def run_unit_tests(exported: Path, tmp_path: Path, tests: list[dict[str, Any]]) -> None:
    # The texts are not tested, so rules without texts are used.
    rules = yaml.safe_load((exported / RULES).read_text())
    for rule in rules["groups"][0]["rules"]:
        del rule["annotations"]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(rules))
    content = {"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "tests.yml").write_text(yaml.safe_dump(content))
    promtool("test", "rules", str(tmp_path / "tests.yml"))


def test_each_alert_fires_for_its_cause(exported: Path, tmp_path: Path) -> None:
    assert {f"Millstream{cause.alert}" for cause in CAUSES} == {
        rule["alert"] for rule in alert_rules()["groups"][0]["rules"]
    }
    tests = [
        unit_test(cause.series, [expected(f"Millstream{cause.alert}", cause.labels, cause.minute)]) for cause in CAUSES
    ]
    run_unit_tests(exported, tmp_path, tests)


def test_no_alert_fires_for_a_healthy_service(exported: Path, tmp_path: Path) -> None:
    """A short restart, an old dead letter and a lag that does not grow fire no alert."""
    checks = [
        {"eval_time": f"{minute}m", "alertname": rule["alert"], "exp_alerts": []}
        for rule in alert_rules()["groups"][0]["rules"]
        for minute in (15, 31, 45)
    ]
    run_unit_tests(exported, tmp_path, [unit_test(QUIET, checks)])
