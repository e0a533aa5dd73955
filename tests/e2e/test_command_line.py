"""The command line in a terminal, against a real redis-server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest
import redis

from millstream import open_blocking_broker
from millstream.broker.scripts import delayed, leases
from millstream.cli.main import DECLINED, DENIED, FINDINGS, NOT_FOUND, UNREACHABLE, USAGE
from millstream.testing import RedisProcess, free_port

MILLSTREAM = str(Path(sys.executable).with_name("millstream"))
HOSTILE = b"evil \x1b]0;owned\x07\x1b[31m\xff\nname"


class Terminal:
    """A terminal of 140 columns in which one types ``millstream ...``."""

    def __init__(self, url: str) -> None:
        self.environment = {**os.environ, "MILLSTREAM_URL": url, "COLUMNS": "140", "LINES": "50", "TERM": "xterm"}

    def types(self, *words: str, answers: dict[str, str] | None = None) -> tuple[int, str]:
        """What is printed, and the exit code. ``answers`` are typed when the question appears."""
        child = pexpect.spawn(
            MILLSTREAM,
            [os.fsencode(word).decode("latin-1") for word in words],
            env=self.environment,
            dimensions=(50, 140),
            timeout=90,
            encoding="latin-1",
        )
        printed = ""
        for question, answer in (answers or {}).items():
            child.expect(question)
            printed += str(child.before) + str(child.after)
            child.sendline(answer)
        child.expect(pexpect.EOF)
        child.close()
        return int(child.exitstatus), printed + str(child.before)

    def pipes(self, *words: str) -> tuple[int, str]:
        """Runs the command without a terminal, as a script does."""
        done = subprocess.run([MILLSTREAM, *words], env=self.environment, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout


@pytest.fixture
def terminal(redis_url: str) -> Terminal:
    return Terminal(redis_url)


def test_first_view_of_the_dashboard(terminal: Terminal) -> None:
    assert terminal.types("streams", "add", "orders", "type=email", "to=a=b")[0] == 0
    assert terminal.types("groups", "create", "orders", "billing", "--start", "0")[0] == 0
    code, text = terminal.types("streams", "ls")
    assert code == 0
    assert "orders" in text
    code, text = terminal.types("streams", "tail", "orders")
    assert "type=email  to=a=b" in text
    code, text = terminal.pipes("groups", "ls", "-o", "json")
    [row] = json.loads(text)
    assert (row["stream"], row["group"], row["lag"], row["oldest_pending_at"]) == ("orders", "billing", 1, None)


def test_help_names_every_command(terminal: Terminal) -> None:
    code, text = terminal.types("--help")
    assert code == 0
    for word in ("streams", "groups", "consumers", "pending", "dlq", "retention", "assignments", "pipeline", "serve"):
        assert word in text
    for word in ("streams", "groups", "consumers", "pending", "dlq", "retention", "assignments", "pipeline"):
        assert terminal.types(word, "--help")[0] == 0
    for word in ("serve", "migrate", "top", "doctor", "demo"):
        assert terminal.types(word, "--help")[0] == 0


def test_names_are_escaped_for_the_terminal(terminal: Terminal, redis_url: str) -> None:
    with open_blocking_broker(redis_url) as broker:
        broker.create_group(HOSTILE, HOSTILE, start="0")
        broker.xadd(HOSTILE, {HOSTILE: HOSTILE})
        broker.xreadgroup(HOSTILE, HOSTILE, HOSTILE)
    for words in (["streams", "ls"], ["groups", "ls"], ["top", "--once", "--interval", "0.2"], ["doctor"]):
        _, text = terminal.types(*words)
        assert "\x1b]0;owned" not in text
        assert "\x07" not in text
    _, text = terminal.types("streams", "ls")
    assert "evil \\x1b]0;owned\\x07\\x1b[31m\\xff\\nname" in text
    name = os.fsdecode(HOSTILE)
    code, text = terminal.types("streams", "tail", name)
    assert code == 0
    assert "\x1b]0;owned" not in text
    code, text = terminal.types("pending", "ls", name, name)
    assert code == 0
    assert "\\x1b]0;owned" in text


def test_destructive_actions_ask_first(terminal: Terminal, redis_url: str) -> None:
    with open_blocking_broker(redis_url) as broker:
        broker.xadd("s", {"n": 1})
        code, text = terminal.types("streams", "rm", "s", answers={r"\[y/N\]": "n"})
        assert code == DECLINED
        assert "1 entry" in text
        assert broker.xlen("s") == 1
        assert terminal.pipes("streams", "rm", "s")[0] == DECLINED
        assert broker.xlen("s") == 1
        assert terminal.types("streams", "rm", "s", answers={r"\[y/N\]": "y"})[0] == 0
        assert broker.xlen("s") == 0


def test_removing_a_stream_names_dead_letters_and_delayed_messages(terminal: Terminal, redis_url: str) -> None:
    with open_blocking_broker(redis_url) as broker:
        broker.xadd("s", {"n": 1})
        broker.xadd("{s}.dlq", {"n": 2})
        broker.run(delayed.publish_later, "s", [("token", {b"n": b"3"})], delay_ms=60_000)
        _, text = terminal.types("streams", "rm", "s", answers={r"\[y/N\]": "n"})
        assert "1 dead letter" in text
        assert "1 message that are delayed" in text


def test_trimming_keeps_what_a_group_needs(terminal: Terminal, redis_url: str) -> None:
    with open_blocking_broker(redis_url) as broker:
        broker.xadd_many("s", [{"n": n} for n in range(10)])
        broker.create_group("s", "g", start="0")
        broker.xreadgroup("s", "g", "c", count=4)
        assert terminal.pipes("streams", "trim", "s", "--max-len", "1", "--yes")[0] == 0
        assert broker.xlen("s") == 10
        assert terminal.pipes("streams", "trim", "s", "--max-len", "1", "--force", "--yes")[0] == 0
        assert broker.xlen("s") == 1


def test_group_is_moved_to_an_id(terminal: Terminal, redis_url: str) -> None:
    with open_blocking_broker(redis_url) as broker:
        broker.xadd_many("s", [{"n": n} for n in range(5)])
        broker.create_group("s", "g", start="$")
        code, text = terminal.types("groups", "reset", "s", "g", "--to-earliest", answers={r"\[y/N\]": "y"})
        assert code == 0
        assert "5 entries delivered again" in text
        assert broker.group_info("s")[0].lag == 5
        assert terminal.pipes("groups", "reset", "s", "g", "--to-latest", "--yes")[0] == 0
        assert broker.group_info("s")[0].lag == 0
        assert terminal.pipes("groups", "reset", "s", "g", "--to-datetime", "2001-01-01", "--yes")[0] == 0
        assert len(broker.xreadgroup("s", "g", "c", count=10)) == 5
        assert terminal.pipes("groups", "reset", "s", "g", "--to-latest", "--to-earliest", "--yes")[0] == USAGE


def test_dead_consumers_are_reaped_with_their_work_handed_over(terminal: Terminal, redis_url: str) -> None:
    with open_blocking_broker(redis_url) as broker:
        broker.create_group("s", "g", start="0")
        broker.xadd("s", {"n": 1})
        broker.xreadgroup("s", "g", "dead")
        code, _ = terminal.pipes("consumers", "reap", "s", "g", "--idle", "0", "--to", "alive", "--yes")
        assert code == 0
        assert broker.xpending("s", "g").consumers == {"alive": 1}


def test_pending_entries_are_claimed_and_acknowledged_by_hand(terminal: Terminal, redis_url: str) -> None:
    with open_blocking_broker(redis_url) as broker:
        broker.create_group("s", "g", start="0")
        entry = broker.xadd("s", {"n": 1})
        broker.xreadgroup("s", "g", "a")
        assert terminal.pipes("pending", "claim", "s", "g", "b", str(entry), "--idle", "0")[0] == 0
        assert broker.xpending("s", "g").consumers == {"b": 1}
        assert terminal.pipes("pending", "ack", "s", "g", str(entry), "--yes")[0] == 0
        assert broker.xpending("s", "g").count == 0


def test_errors_advise_what_to_do_and_have_distinct_exit_codes(terminal: Terminal) -> None:
    code, text = terminal.types("groups", "rm", "nothing", "there", "--yes")
    assert code == NOT_FOUND, text
    assert terminal.types("streams", "add", "s", "novalue")[0] == USAGE
    assert terminal.types("streams", "ls", "--url", "gopher://x")[0] == USAGE
    code, text = Terminal(f"redis://127.0.0.1:{free_port()}").types("streams", "ls")
    assert code == UNREACHABLE
    assert "error:" in text
    assert "Traceback" not in text


def test_wrong_password_is_refused_and_not_printed() -> None:
    with RedisProcess(["--requirepass", "right"]) as server:
        address = server.url.removeprefix("redis://")
        code, text = Terminal(f"redis://:wr0ng-secret@{address}").types("streams", "ls")
        assert code == DENIED
        assert "wr0ng-secret" not in text
        assert Terminal(f"redis://:right@{address}").types("streams", "ls")[0] == 0


def test_doctor_reports_findings_of_a_stream(terminal: Terminal, redis_url: str) -> None:
    with open_blocking_broker(redis_url) as broker:
        broker.xadd("s", {"n": 1})
    code, text = terminal.types("doctor", "s")
    assert code == FINDINGS
    assert "entries are not processed" in text
    assert "millstream groups create s GROUP --start 0" in text
    code, text = terminal.types("doctor")
    assert code == FINDINGS
    assert "CONFIG SET appendonly yes" in text


def test_thousand_streams_are_listed(terminal: Terminal, redis_url: str) -> None:
    client = redis.Redis.from_url(redis_url)
    pipeline = client.pipeline(transaction=False)
    for number in range(1000):
        pipeline.xadd(f"stream-{number:04}", {"n": 1})
        for group in range(10):
            pipeline.xgroup_create(f"stream-{number:04}", f"g{group}", id="0")
    pipeline.execute()
    code, text = terminal.pipes("streams", "ls", "-o", "json")
    assert code == 0
    assert len(json.loads(text)) == 1000
    code, text = terminal.pipes("top", "--once", "--interval", "0.2", "-o", "json")
    assert code == 0
    assert len(json.loads(text)) == 1000


def test_top_is_live_until_it_is_interrupted(terminal: Terminal, redis_url: str) -> None:
    with open_blocking_broker(redis_url) as broker:
        broker.xadd("first", {"n": 1})
        child = pexpect.spawn(
            MILLSTREAM, ["top", "--interval", "0.2"], env=terminal.environment, dimensions=(30, 120), timeout=90
        )
        child.expect("first")
        broker.xadd("second", {"n": 1})
        child.expect("second")
        child.sendintr()
        child.expect(pexpect.EOF)
        child.close()
    assert child.exitstatus == 0


def test_top_waits_for_an_unreachable_server_and_q_quits() -> None:
    with RedisProcess() as server:
        with open_blocking_broker(server.url) as broker:
            broker.xadd("before", {"n": 1})
        words = ["top", "--interval", "0.2", "--url", server.url]
        child = pexpect.spawn(MILLSTREAM, words, env={**os.environ, "TERM": "xterm"}, dimensions=(30, 80), timeout=90)
        child.expect("before")
        server.kill()
        child.expect("The server is unreachable; retrying")
        server.start()
        with open_blocking_broker(server.url) as broker:
            broker.xadd("after", {"n": 1})
        child.expect("after")
        child.send("q")
        child.expect(pexpect.EOF)
        child.close()
    assert child.exitstatus == 0


def test_assignments_are_shown_announced_and_released(terminal: Terminal, redis_url: str) -> None:
    assert terminal.types("assignments", "announce", "svc", "data-1", "--info", '{"tenant": "a"}')[0] == 0
    with open_blocking_broker(redis_url) as broker:
        broker.create_group("svc-input", "svc-group", start="0")
        broker.run(leases.heartbeat, "svc-input", "m1", lease_ms=60_000, owned=1, capacity=10)
        broker.xreadgroup("svc-input", "svc-group", "m1")
        broker.run(leases.take_leases, "m1", [("data-1", None)])
    code, text = terminal.pipes("assignments", "ls", "svc", "-o", "json")
    assert code == 0
    [row] = json.loads(text)
    assert (row["stream"], row["owner"], row["alive"]) == ("data-1", "m1", True)
    assert terminal.pipes("assignments", "release", "svc", "data-1", "--yes")[0] == 0
    [row] = json.loads(terminal.pipes("assignments", "ls", "svc", "-o", "json")[1])
    assert row["owner"] is None
