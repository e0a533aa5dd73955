"""``millstream dlq`` and ``millstream retention`` against a real redis-server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from millstream import BlockingBroker, open_blocking_broker
from millstream.cli.dlq import app as dlq_app
from millstream.cli.main import DECLINED, FAILED
from millstream.cli.retention import app as retention_app
from millstream.cli.retention import read_policies
from millstream.errors import InvalidArgument
from millstream.messaging.dead_letters import NoSuchDeadLetter
from millstream.messaging.failure import DeadLetterDetails, dead_letter_fields
from millstream.messaging.retention import RetentionPolicy
from millstream.testing import wait_until


class Terminal:
    def __init__(self, url: str) -> None:
        self.url = url

    def run(self, app: Any, *words: str, fails_with: int = 0) -> str:
        result = CliRunner().invoke(app, [*words, "--url", self.url], env={"COLUMNS": "200"})
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == fails_with, result.output
        return result.output

    def json(self, app: Any, *words: str) -> Any:
        return json.loads(self.run(app, *words, "-o", "json"))


@pytest.fixture
def terminal(redis_url: str) -> Terminal:
    return Terminal(redis_url)


@pytest.fixture
def letters(redis_url: str) -> BlockingBroker:
    broker = open_blocking_broker(redis_url)
    broker.create_group("orders", "billing", start="0")
    for n in range(5):
        details = DeadLetterDetails(
            stream="orders",
            original_id=f"{n}-1",
            group="billing",
            consumer="w",
            deliveries=5,
            error=f"order {n} not found\x1b[2J",
            error_type="LookupError" if n < 3 else "OSError",
            traceback="Traceback:\n  line\x1b[2J",
            buried_at_ms=1,
        )
        broker.xadd("{orders}.dlq", dead_letter_fields({b"payload": b"%d" % n, b"uuid": b"u%d" % n}, details))
    return broker


def test_dead_letters_are_printed_with_control_characters_escaped(terminal: Terminal, letters: BlockingBroker) -> None:
    for output in (
        terminal.run(dlq_app, "ls"),
        terminal.run(dlq_app, "ls", "orders"),
        terminal.run(dlq_app, "errors", "orders"),
        terminal.run(dlq_app, "show", "orders", terminal.json(dlq_app, "ls", "orders")[0]["id"]),
    ):
        assert "not found" in output
        assert "\x1b[2J" not in output
    listed = terminal.json(dlq_app, "ls", "orders", "--error-type", "OSError")
    assert [item["original_id"] for item in listed] == ["4-1", "3-1"]
    counted = terminal.json(dlq_app, "errors", "orders")
    assert [(item["count"], item["error_type"]) for item in counted] == [(3, "LookupError"), (2, "OSError")]
    letter = terminal.json(dlq_app, "show", "orders", listed[0]["id"])
    assert letter["fields"] == {"payload": "4", "uuid": "u4"}
    assert letter["traceback"].startswith("Traceback")
    assert terminal.json(dlq_app, "ls")[0]["count"] == 5


def test_dead_letters_are_replayed_and_purged(terminal: Terminal, letters: BlockingBroker) -> None:
    assert "would replay 5 to orders" in terminal.run(dlq_app, "replay", "orders", "--dry-run")
    assert letters.xlen("orders") == 0
    batch = terminal.json(dlq_app, "replay", "orders", "--error-type", "LookupError", "--rate", "1000", "--limit", "2")
    went = {"added": 2, "already": 0, "left": 0, "without_handler": []}
    assert batch == {**went, "streams": {"orders": 2}, "dry_run": False}
    assert letters.xlen("orders") == 2
    assert "would purge 3" in terminal.run(dlq_app, "purge", "orders", "--dry-run")
    assert "--yes" in terminal.run(dlq_app, "purge", "orders", fails_with=DECLINED)
    assert letters.xlen("{orders}.dlq") == 3
    chosen = terminal.json(dlq_app, "ls", "orders")[0]["id"]
    assert "purged 1" in terminal.run(dlq_app, "purge", "orders", "--id", chosen, "--yes")
    assert "purged 2" in terminal.run(dlq_app, "purge", "orders", "--yes")
    assert terminal.json(dlq_app, "ls", "orders") == []


def test_dead_letters_without_a_group_are_kept_with_a_remedy(terminal: Terminal, letters: BlockingBroker) -> None:
    printed = terminal.run(dlq_app, "replay", "orders", "--to", "nowhere", fails_with=FAILED)
    assert "5 were kept: 'nowhere' has no group that would read them" in printed
    assert "millstream groups create nowhere NAME --start 0" in printed
    letters.delete_group("orders", "billing")
    letters.create_group("orders", "billing-v2", start="0")
    printed = terminal.run(dlq_app, "replay", "orders", fails_with=FAILED)
    assert "5 were kept: 'orders' has no group 'billing': pass --for-group" in printed
    assert letters.xlen("{orders}.dlq") == 5
    assert "replayed 5 to orders" in terminal.run(dlq_app, "replay", "orders", "--for-group", "billing-v2")
    assert [entry.fields[b"replay.group"] for entry in letters.xrange("orders")] == [b"billing-v2"] * 5


def test_dead_letters_of_a_pipeline_show_their_reason(terminal: Terminal, redis_url: str) -> None:
    with open_blocking_broker(redis_url) as broker:
        for event in ("e1", "e2"):
            fields = {"id": event, "reason": f"no column total in {event}", "stage": "sql", "payload": "{}"}
            broker.xadd("shop.dlq", {**fields, "table": "orders", "key": "1", "pipeline": "shop", "batch": "3"})
    for name in ("shop", "shop.dlq"):  # by the pipeline's name, and by the stream's own
        newest, _ = terminal.json(dlq_app, "ls", name)
        printed = (newest["pipeline"], newest["stage"], newest["original_id"], newest["error"])
        assert printed == ("shop", "sql", "e2", "no column total in e2")
    assert "no column total in e1" in terminal.run(dlq_app, "ls", "shop")
    assert "no column total in e1" in terminal.run(
        dlq_app, "show", "shop", terminal.json(dlq_app, "ls", "shop")[1]["id"]
    )
    [alike] = terminal.json(dlq_app, "errors", "shop")
    assert (alike["count"], alike["error_type"]) == (2, "sql")
    [listed] = terminal.json(dlq_app, "ls")
    assert (listed["dead_letters"], listed["count"], listed["error_type"]) == ("shop.dlq", 2, "sql")
    printed = terminal.run(dlq_app, "replay", "shop", fails_with=FAILED)
    assert "2 were kept, because they do not name their stream" in printed


def test_bad_ids_are_refused(terminal: Terminal, letters: BlockingBroker) -> None:
    with pytest.raises(NoSuchDeadLetter, match="may have been replayed"):
        terminal.run(dlq_app, "show", "orders", "1-1")
    with pytest.raises(InvalidArgument, match="--id"):
        terminal.run(dlq_app, "purge", "orders", "--id", "everything", "--yes")
    assert letters.xlen("{orders}.dlq") == 5


def test_policies_are_applied_once_and_delaying_groups_are_shown(terminal: Terminal, redis_url: str) -> None:
    with open_blocking_broker(redis_url) as broker:
        broker.xadd_many("orders", [{"n": n} for n in range(10)])
        broker.xadd_many("logs", [{"n": n} for n in range(10)])
        broker.create_group("orders", "abandoned", start="0")
        rows = {row["stream"]: row for row in terminal.json(retention_app, "apply", "orders", "logs", "--max-len", "4")}
        assert (rows["logs"]["dropped"], rows["logs"]["length"], rows["logs"]["held_back_by"]) == (6, 4, [])
        assert (rows["orders"]["dropped"], rows["orders"]["length"]) == (0, 10)
        assert rows["orders"]["held_back_by"] == [{"group": "abandoned", "entries": 6, "idle_ms": None, "dead": True}]
        assert "abandoned (6, dead: no consumer)" in terminal.run(retention_app, "apply", "orders", "--max-len", "4")
        [standing] = terminal.json(retention_app, "ls", "orders")
        assert (standing["length"], standing["trim_waits_for"], standing["lag"]) == (10, "abandoned", 10)
        table = terminal.run(retention_app, "apply", "orders", "--hard-max-len", "3")
        assert "abandoned (7)" in table
        assert broker.xlen("orders") == 3


def test_acknowledged_entries_are_deleted_on_request(terminal: Terminal, redis_url: str) -> None:
    with open_blocking_broker(redis_url) as broker:
        broker.xadd_many("orders", [{"n": n} for n in range(6)])
        for group in ("quick", "slow"):
            broker.create_group("orders", group, start="0")
            read = broker.xreadgroup("orders", group, "c", count=6)
            broker.xack("orders", group, [item.id for item in (read if group == "quick" else read[2:4])])
        [row] = terminal.json(retention_app, "apply", "orders", "--delete-acked")
        assert (row["dropped"], row["length"]) == (2, 4)


def test_janitor_runs_until_it_is_stopped(redis_url: str, tmp_path: Path) -> None:
    config = tmp_path / "retention.yaml"
    config.write_text("orders: {max_len: 2}\nevents.*: {max_age: 7d}\n")
    words = ["retention", "run", "--config", str(config), "--every", "50ms", "--url", redis_url]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with open_blocking_broker(redis_url) as broker:
        broker.xadd_many("orders", [{"n": n} for n in range(10)])
        process = subprocess.Popen(
            [sys.executable, "-m", "millstream", *words], env=environment, stderr=subprocess.PIPE
        )
        try:
            wait_until(lambda: broker.xlen("orders") == 2, what="the first pass", timeout_s=60)
            broker.xadd_many("orders", [{"n": n} for n in range(10)])
            wait_until(lambda: broker.xlen("orders") == 2, what="a later pass")
        finally:
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert b"dropped 8 entries of 'orders', 2 are left" in errors


def test_policies_come_from_the_command_line_and_from_a_file(tmp_path: Path) -> None:
    config = tmp_path / "retention.yaml"
    config.write_text("orders: {max_len: 2}\nlogs: {max_age: 7d, hard_max_bytes: 1gb}\n")
    policies = read_policies(["orders"], {"max_len": 5, "max_age": None}, config)
    assert policies == {
        "orders": RetentionPolicy(max_len=5),
        "logs": RetentionPolicy(max_age_ms=604_800_000, hard_max_bytes=1 << 30),
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- orders", "a mapping"),
        ("orders: 5", "a mapping of limits"),
        ("orders: {max_length: 5}", "max_length"),
        ("orders: {max_age: soon}", r"orders\.max_age"),
        ("orders: {", "valid YAML"),
        ("orders: !!python/object/apply:os.system [true]", "valid YAML"),
        ("", "a mapping"),
    ],
)
def test_invalid_file_is_refused_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    config = tmp_path / "retention.yaml"
    config.write_text(text)
    with pytest.raises(InvalidArgument, match=says):
        read_policies([], {}, config)


def test_streams_without_limits_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="at least one"):
        read_policies(["orders"], {"max_len": None}, None)
    with pytest.raises(InvalidArgument, match="streams"):
        read_policies([], {}, None)


def test_retention_lists_every_stream_next_to_one_with_an_unusual_name(terminal: Terminal, redis_url: str) -> None:
    names = {"orders", "a}b", "{}"}
    with open_blocking_broker(redis_url) as broker:
        for name in names:
            broker.xadd(name, {"n": 1})
    rows = terminal.json(retention_app, "ls")
    assert {row["stream"] for row in rows} == names
    assert all(row["lost"] == [] for row in rows)


def test_empty_name_is_refused_as_such(terminal: Terminal) -> None:
    with pytest.raises(InvalidArgument):
        terminal.run(dlq_app, "ls", "")
