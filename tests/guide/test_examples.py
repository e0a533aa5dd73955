"""Every example under ``examples/`` runs unchanged, embedded and on a real redis-server, with its documented output."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

EXPECTED_OUTPUT = {
    "background_jobs": [
        "done: resize-image (delivery 1)",
        "done: send-email (delivery 2)",
        "dead-lettered: 1 x ValueError: no worker knows the job 'fold-laundry'",
    ],
    "event_broadcasting": [
        "analytics received 12 events",
        "notifications received 12 events",
        "audit received 12 events",
        "instances 1 and 2 of notifications: 12",
    ],
    "rate_limited_processing": ["25 calls at 50 a second took at least 0.48 s: True"],
    "three_groups": [
        "two entries\n  group1: pending=0 read=None lag=2 consumers=(none)",
        "group1: pending=2 read=2 lag=0 consumers=(consumer1: 1 pending, consumer2: 1 pending)",
        "group1 has acknowledged both\n"
        "  group1: pending=0 read=2 lag=0 consumers=(consumer1: 0 pending, consumer2: 0 pending)\n"
        "  group2: pending=0 read=None lag=2 consumers=(none)\n"
        "  group3: pending=0 read=None lag=2 consumers=(none)",
        "nothing is delivered twice in group1: True",
        "group2 still gets both: True",
    ],
    "reassign_messages": [
        "pending: [('worker-1', 1), ('worker-1', 1)]",
        "worker-2 claimed 2",
        "pending: [('worker-2', 2), ('worker-2', 2)]",
        "worker-3 did tasks 3, 4; pending: 0",
    ],
    "cache_invalidation": [
        "both read the database: 10, 10",
        "both read the new price: 12, 12",
        "the unchanged price is still cached: 2",
        "groups on the stream: 0",
    ],
    "live_updates": [
        "Ann saw ['1:0', '1:1', '2:1', '3:1']",
        "Bob saw ['1:0'], disconnected, reconnected and saw ['1:1', '2:1', '3:1']",
        "groups on the stream: 0",
    ],
}


def test_every_example_has_expected_output() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(EXPECTED_OUTPUT)


@pytest.mark.parametrize("column", ["local", "redis"])
@pytest.mark.parametrize("name", EXPECTED_OUTPUT)
def test_example_prints_its_documented_output(name: str, column: str, request: pytest.FixtureRequest) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment.pop("MILLSTREAM_URL", None)
    if column == "redis":
        environment["MILLSTREAM_URL"] = request.getfixturevalue("redis_url")
    ran = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    # The log shows a handler's traceback with the frames of the handler, without frames of the library.
    assert not re.search(r'File "[^"]*/millstream/(?!.*examples)', ran.stderr), ran.stderr
    for line in EXPECTED_OUTPUT[name]:
        assert line in ran.stdout
