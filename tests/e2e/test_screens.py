"""Every command in a terminal of 80 columns, with names of 48 characters, compared line by line.

The expected output is in ``screens.txt``. ``UPDATE_SCREENS=1`` writes it; review the difference before a commit.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest
from rich.cells import cell_len

from millstream import BlockingBroker, open_blocking_broker
from millstream.assignment import Announcement, announce_stream
from millstream.broker.scripts import leases
from millstream.messaging.failure import DeadLetterDetails, dead_letter_fields
from millstream.testing import RedisProcess

sys.path.insert(0, str(Path(__file__).parents[1] / "integration" / "cli"))
from test_json_keys import commands

SCREENS = Path(__file__).with_name("screens.txt")
STREAM = "orders.eu-central-1.customer-000000000042.events"
GROUP = "billing-and-invoicing-of-the-european-subsidiary"
CONSUMER = "worker-7f9c6d5b8-x2k4q.eu-central-1.internal.net"
NAMES = {"STREAM": STREAM, "GROUP": GROUP, "CONSUMER": CONSUMER}
COMMANDS = """
pending claim STREAM GROUP CONSUMER 1700000000000-0 --idle 0
doctor STREAM --watch 0
streams ls
streams describe STREAM
streams tail STREAM -n 2
streams trim STREAM --max-len 100 --yes
groups ls
groups describe STREAM GROUP
consumers ls STREAM
pending ls STREAM
pending ls STREAM GROUP
pending ls STREAM GROUP --entries
dlq ls
dlq ls STREAM
dlq show STREAM 1700000000500-0
dlq errors STREAM
dlq replay STREAM --dry-run
dlq purge STREAM --dry-run
dlq ls shop
retention ls
retention apply STREAM --max-len 1000000
assignments ls GROUP
pipeline ls
pipeline plan shop.yaml
pipeline status shop.yaml
run worker:router --check
top --once --interval 0.2
streams describe missing
streams add STREAM-2 customer=4711 --id 1700000000000-0
groups create STREAM GROUP-2 --start 0
groups reset STREAM GROUP-2 --to-latest --yes
pending ack STREAM GROUP 1700000000000-1 --yes
assignments announce GROUP STREAM-2
assignments release GROUP STREAM --yes
pipeline validate shop.yaml
pipeline validate wrong.yaml
pipeline checkpoints shop.yaml
pipeline reset shop.yaml --yes
migrate --from local:///nowhere --to redis://127.0.0.1:1
migrate --from local://here/embedded --to redis://127.0.0.1:PORT/9
streams del STREAM 1700000000000-0 --yes
consumers reap STREAM GROUP --idle 0 --discard --yes
groups rm STREAM GROUP --yes
streams rm STREAM --yes
--url redis://127.0.0.1:PORT/9 streams ls
"""
SHOWN_ELSEWHERE = {
    "serve": "test_serve_command.py",
    "dashboard": "test_dashboard_pages.py",
    "retention run": "test_dlq_and_retention.py",
    "pipeline run": "test_pipeline_speaks.py",
    "pipeline prepare": "test_prepared_start.py",
    "pipeline replay-dead-letters": "test_pipeline_speaks.py",
    "pipeline schema": "test_pipeline_commands.py",
    "verify": "test_verify.py",
    "demo": "test_demo.py",
    "init": "test_init.py",
    "observe export": "test_prometheus_rules.py",
}
"""Commands that run long, or print a document, and the test file that checks their output."""
DRIVER = """
import sys
from millstream.cli.main import main

for line in open(sys.argv[1]):
    sys.argv = ["millstream", *line.split()]
    sys.stdout.write("\\n$ " + line)
    sys.stdout.flush()
    try:
        main()
    except SystemExit as ended:
        sys.stdout.flush()
        sys.stderr.flush()
        print(f"exit {ended.code or 0}", flush=True)
"""
"""All commands in one process, on one terminal: an interpreter for each would take a minute."""


def fill(broker: BlockingBroker) -> None:
    for n in range(3):
        broker.xadd(STREAM, {"customer": f"customer-{n}", "payload": "x" * 90}, id=f"1700000000000-{n}")
    broker.create_group(STREAM, GROUP, start="0")
    broker.xreadgroup(STREAM, GROUP, CONSUMER, count=2)
    error = "order 4711 of customer customer-000000000042 was not found in any of the warehouses"
    details = DeadLetterDetails(STREAM, "1-1", GROUP, CONSUMER, 5, error, "shop.errors.OrderNotFound", "", 1)
    broker.xadd(f"{{{STREAM}}}.dlq", dead_letter_fields({b"payload": b"y" * 90}, details), id="1700000000500-0")
    letter = {"id": "e1", "reason": "no column called total in the row", "stage": "sql", "pipeline": "shop"}
    broker.xadd("shop.dlq", letter, id="1700000000600-0")
    announce_stream(broker, GROUP, Announcement(STREAM, {"tenant": "a"}))
    broker.create_group(f"{GROUP}-input", f"{GROUP}-group", start="0")
    broker.run(leases.heartbeat, f"{GROUP}-input", CONSUMER, lease_ms=3_600_000, owned=1, capacity=10)
    broker.xreadgroup(f"{GROUP}-input", f"{GROUP}-group", CONSUMER)
    broker.run(leases.take_leases, CONSUMER, [(STREAM, None)])


@pytest.fixture
def here() -> Iterator[Path]:
    """A directory whose name has the same length on every machine, because it is printed."""
    with tempfile.TemporaryDirectory(prefix="here-", dir="/tmp") as directory:
        yield Path(directory)


@pytest.fixture
def server() -> Iterator[RedisProcess]:
    """Of its own: `doctor` concludes from the clients of a server that no consumer is alive."""
    with RedisProcess() as process:
        yield process


@pytest.fixture
def screens(server: RedisProcess, here: Path) -> str:
    redis_url = server.url
    with open_blocking_broker(redis_url) as broker:
        fill(broker)
    (here / "shop.yaml").write_text(
        "apiVersion: millstream/v1\nkind: Pipeline\nmetadata: {name: shop}\nspec:\n"
        "  source: {type: generator, config: {rows: 10}}\n"
        "  checkpoint: {path: here}\n"
        f"  sinks: [{{type: redis, config: {{id: out, uri: 'redis://127.0.0.1:1', stream: {STREAM}}}}}]\n"
    )
    (here / "wrong.yaml").write_text((here / "shop.yaml").read_text().replace("id: out,", "id: out, strem: x,"))
    (here / "worker.py").write_text(
        "from millstream import Message, Router\n\nrouter = Router()\n\n\n"
        f"@router.on('{STREAM}', group='{GROUP}', group_start='0')\nasync def work(message: Message) -> None: ...\n"
    )
    with open_blocking_broker(f"local://{here}/embedded") as embedded:
        embedded.xadd(STREAM, {"n": 1})
    lines = COMMANDS.strip().replace("local://here/", f"local://{here}/").replace("PORT", redis_url.rpartition(":")[2])
    for word, name in NAMES.items():
        lines = re.sub(rf"\b{word}\b", name, lines)
    (here / "commands").write_text(lines + "\n")
    (here / "driver.py").write_text(DRIVER)
    environment = {**os.environ, "MILLSTREAM_URL": redis_url, "TERM": "xterm", "PYTHONPATH": str(here)}
    environment.pop("COLUMNS", None)
    child = pexpect.spawn(
        sys.executable,
        ["driver.py", "commands"],
        env=environment,
        cwd=str(here),
        dimensions=(50, 80),
        timeout=120,
        encoding="utf-8",
    )
    child.expect(pexpect.EOF)
    child.close()
    port = redis_url.rpartition(":")[2]
    return steady(str(child.before).replace(str(here), "/here").replace(f":{port}", ":6379"))


def steady(printed: str) -> str:
    """The output without colours and without values that change in every run: ages, sizes, times, and ids by the
    clock."""
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", printed)
    text = "\n".join(
        line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")
    )  # text that was overwritten is not visible
    text = re.sub(r"\b[\d,.]+ (ms|s|min|h|d)\b", lambda result: "#" * (len(result[0]) - 2) + " s", text)
    text = re.sub(r"\b[\d.]+ (B|kB|MB|GB)\b", lambda found: "#" * (len(found[0]) - 2) + " B", text)
    text = re.sub(r"(?m)^moving .*\n", "", text)  # a progress bar that is erased at its end: its last state is random
    text = re.sub(r"(?m)^dashboard_\w+ .*$", lambda found: re.sub(r"[\d.,]+|yes|no", "#", found[0]), text)
    return re.sub(r"\b1[789]\d{11}\b(?<!1700000000\d{3})", "#" * 13, text)


def test_every_line_fits_the_terminal(screens: str) -> None:
    for line in screens.splitlines():
        if not line.startswith("$ "):  # the typed command is wrapped by the terminal
            assert cell_len(line) <= 80, line
    golden = [
        re.sub(r" {2,}|#+", lambda result: "  " if " " in result[0] else "#", line) for line in screens.splitlines()
    ]
    expected = "\n".join(golden).strip() + "\n"
    if os.environ.get("UPDATE_SCREENS"):
        SCREENS.write_text(expected)
    assert expected == SCREENS.read_text()


def test_every_command_has_its_screen() -> None:
    typed = [line.removeprefix("--url redis://127.0.0.1:PORT/9 ") for line in COMMANDS.strip().splitlines()]
    for name, command in commands():
        text = any(line == name or line.startswith(f"{name} ") for line in typed)
        assert command.hidden or text != (name in SHOWN_ELSEWHERE), name
    tests = {path.name for path in Path(__file__).parents[1].rglob("test_*.py")}
    assert set(SHOWN_ELSEWHERE.values()) <= tests
