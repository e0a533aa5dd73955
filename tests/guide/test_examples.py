"""Every example under ``examples/`` runs as it stands, in its own process and on a real redis-server, and says what
its text promises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

SAYS = {
    "background_jobs": [
        "done: resize-image (delivery 1)",
        "done: send-email (delivery 2)",
        "buried: 1 x ValueError: no worker knows the job 'fold-laundry'",
    ],
    "event_broadcasting": [
        "analytics heard 12 events",
        "notifications heard 12 events",
        "audit heard 12 events",
        "its two instances together: 12",
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
        "both have heard of the change: 12, 12",
        "what did not change is still cached: 2",
        "groups on the stream: 0",
    ],
    "live_updates": [
        "Ann saw ['1:0', '1:1', '2:1', '3:1']",
        "Bob saw ['1:0'], went away, came back and saw ['1:1', '2:1', '3:1']",
        "left behind on the stream: 0 groups",
    ],
}


def test_no_example_is_left_out() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(SAYS)


@pytest.mark.parametrize("column", ["local", "redis"])
@pytest.mark.parametrize("name", SAYS)
def test_an_example_runs_and_says_what_it_promises(name: str, column: str, request: pytest.FixtureRequest) -> None:
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
    # What a handler raised is told, with its own frames; a traceback with ours in it would be a fault.
    assert not re.search(r'File "[^"]*/millstream/(?!.*examples)', ran.stderr), ran.stderr
    for line in SAYS[name]:
        assert line in ran.stdout
