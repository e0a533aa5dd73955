"""A Prometheus with the exported alert rules, in seconds in place of minutes, so that a test can wait for an alert."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import yaml

from millstream.observe.alerts import alert_rules
from millstream.testing import free_port, wait_until

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed (Debian: prometheus)"
)


def fast_rules() -> dict[str, Any]:
    rules = alert_rules()
    for rule in rules["groups"][0]["rules"]:
        rule["for"] = "0s"
        rule["expr"] = re.sub(r"\[\d+[mh]\]", "[20s]", rule["expr"])
        rule["expr"] = re.sub(r"offset \d+[mh]", "offset 20s", rule["expr"])
        rule["expr"] = rule["expr"].replace("oldest_pending_seconds) > 600", "oldest_pending_seconds) > 2")
    return rules


class Prometheus:
    """Scrapes ``ports`` of this machine twice a second."""

    def __init__(self, directory: Path, *ports: int) -> None:
        self.port = free_port()
        (directory / "rules.yml").write_text(yaml.safe_dump(fast_rules()))
        targets = [f"127.0.0.1:{port}" for port in ports]
        scrape = {"job_name": "shop", "static_configs": [{"targets": targets}]}
        intervals = {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"}
        config = {"global": intervals, "rule_files": ["rules.yml"], "scrape_configs": [scrape]}
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        options = [
            f"--config.file={directory / 'prometheus.yml'}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{self.port}",
        ]
        with (directory / "prometheus.log").open("w") as log:
            self.process = subprocess.Popen(["prometheus", *options], stdout=log, stderr=log)

    def __enter__(self) -> Self:
        wait_until(self.is_scraping, timeout_s=60)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(10)

    def get(self, path: str, **parameters: str) -> Any:
        with urlopen(f"http://127.0.0.1:{self.port}/api/v1/{path}?{urlencode(parameters)}", timeout=10) as response:
            reply = json.load(response)
        assert reply["status"] == "success", reply
        return reply["data"]

    def is_scraping(self) -> bool:
        try:
            return any(target["health"] == "up" for target in self.get("targets")["activeTargets"])
        except OSError:
            return False

    def series(self, expression: str) -> list[dict[str, Any]]:
        result: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return result

    def firing(self) -> set[str]:
        return {alert["labels"]["alertname"] for alert in self.get("alerts")["alerts"] if alert["state"] == "firing"}

    def are_firing(self, *alerts: str) -> bool:
        """Whether these alerts fire, named without their prefix."""
        return {f"Millstream{alert}" for alert in alerts} <= self.firing()

    def wait_for(self, *alerts: str, timeout_s: float = 60) -> None:
        wait_until(lambda: self.are_firing(*alerts), what=f"{alerts} to fire", timeout_s=timeout_s)
