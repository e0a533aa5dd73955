"""Commands for missing objects: the documented exit code, and the command to type next."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from millstream import BlockingBroker, __version__, open_blocking_broker
from millstream.cli.main import FAILED, FINDINGS, NOT_FOUND, USAGE, main
from millstream.wire.commands import Command

Typed = Callable[..., tuple[int, str, str]]


@pytest.fixture
def types(redis_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    monkeypatch.setenv("MILLSTREAM_URL", redis_url)

    def types(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["millstream", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        assert code is None or isinstance(code, int)
        return code or 0, *capsys.readouterr()

    return types


@pytest.fixture
def broker(redis_url: str) -> BlockingBroker:
    broker = open_blocking_broker(redis_url)
    broker.xadd("orders", {"n": 1}, id="5-1")
    broker.create_group("orders", "billing", start="0")
    broker.xreadgroup("orders", "billing", "w1")
    broker.set("plain", "x")
    return broker


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("streams ls missing", "millstream streams ls"),
        ("streams describe missing", "millstream streams ls"),
        ("streams tail missing", "millstream streams ls"),
        ("streams tail ordres", "did you mean 'orders'?"),
        ("groups ls Orders", "did you mean 'orders'?"),
        ("streams del missing 1-1 --yes", "millstream streams ls"),
        ("streams del orders 1-1 --yes", "Nothing was changed"),
        ("streams trim missing --max-len 1 --yes", "millstream streams ls"),
        ("streams rm missing --yes", "millstream streams ls"),
        ("groups ls missing", "millstream streams ls"),
        ("groups describe missing billing", "millstream streams ls"),
        ("groups describe orders missing", "millstream groups create orders missing --start 0"),
        ("groups rm missing billing --yes", "millstream streams ls"),
        ("groups rm orders missing --yes", "'billing'"),
        ("groups reset missing billing --to-latest --yes", "millstream streams ls"),
        ("groups reset orders missing --to-latest --yes", "millstream groups create orders missing --start 0"),
        ("consumers ls missing", "millstream streams ls"),
        ("consumers ls orders missing", "millstream groups create orders missing --start 0"),
        ("consumers reap missing billing --yes", "millstream streams ls"),
        ("consumers reap orders missing --yes", "millstream groups create orders missing --start 0"),
        ("pending ls missing billing", "millstream streams ls"),
        ("pending ls orders missing", "millstream groups create orders missing --start 0"),
        ("pending ls orders billing --consumer missing", "millstream consumers ls orders billing"),
        ("pending claim missing billing w2 5-1", "millstream streams ls"),
        ("pending claim orders missing w2 5-1", "millstream groups create orders missing --start 0"),
        ("pending claim orders billing w2 9-9 --idle 0", "Nothing was changed"),
        ("pending ack missing billing 5-1 --yes", "millstream streams ls"),
        ("pending ack orders missing 5-1 --yes", "millstream groups create orders missing --start 0"),
        ("pending ack orders billing 9-9 --yes", "Nothing was changed"),
        ("dlq ls missing", "millstream streams ls"),
        ("dlq errors missing", "millstream streams ls"),
        ("dlq show missing 1-1", "millstream streams ls"),
        ("dlq show orders 1-1", "replayed or purged"),
        ("dlq replay missing", "millstream streams ls"),
        ("dlq replay orders --id 9-9", "millstream dlq ls orders"),
        ("dlq purge missing --yes", "millstream streams ls"),
        ("dlq purge orders --id 9-9 --yes", "millstream dlq ls orders"),
        ("retention apply missing --max-len 5", "millstream streams ls"),
        ("doctor missing", "millstream streams ls"),
        ("pending ls missing", "millstream streams ls"),
        ("retention ls missing", "millstream streams ls"),
        ("assignments ls missing", "millstream assignments announce missing STREAM"),
        ("assignments release missing a --yes", "millstream assignments announce missing STREAM"),
    ],
)
def test_missing_object_is_reported_with_a_command(types: Typed, broker: BlockingBroker, line: str, says: str) -> None:
    code, printed, stderr = types(*line.split())

    assert (code, printed) == (NOT_FOUND, ""), stderr
    assert says in stderr
    assert "create_group" not in stderr, "that is Python, and a shell is typed into"
    assert ".." not in stderr
    assert [entry.id for entry in broker.xrange("orders")] == [(5, 1)]
    assert broker.list_streams() == ["orders"]
    assert broker.xpending("orders", "billing").count == 1


def test_release_of_an_unannounced_stream_fails(types: Typed, broker: BlockingBroker) -> None:
    assert types("assignments", "announce", "service", "a")[0] == 0

    code, _, stderr = types("assignments", "release", "service", "b", "--yes")

    assert code == NOT_FOUND
    assert "millstream assignments ls service" in stderr


def test_stream_without_owner_can_be_released(types: Typed, broker: BlockingBroker) -> None:
    assert types("assignments", "announce", "service", "a")[0] == 0

    code, printed, stderr = types("assignments", "release", "service", "a", "--yes")

    assert (code, "it had no owner" in printed + stderr) == (0, True)


@pytest.mark.parametrize("line", ["streams ls", "dlq ls", "retention apply s --max-len 1", "top --once", "doctor"])
@pytest.mark.parametrize("url", ["local://", "local://name"])
def test_in_memory_broker_is_refused(types: Typed, line: str, url: str) -> None:
    code, printed, stderr = types(*line.split(), "--url", url)

    assert (code, printed) == (USAGE, "")
    assert "only within one process" in stderr
    assert "local:///path" in stderr


def test_key_of_another_type_is_not_called_missing(types: Typed, broker: BlockingBroker) -> None:
    code, _, stderr = types("streams", "describe", "plain")

    assert code == 1
    assert "WRONGTYPE" in stderr


@pytest.mark.parametrize("line", ["streams ls miss*", "groups ls miss*", "dlq ls orders", "dlq ls"])
def test_empty_result_without_a_name_is_no_error(types: Typed, broker: BlockingBroker, line: str) -> None:
    assert types(*line.split())[0] == 0
    code, printed, _ = types(*line.split(), "-o", "json")
    assert (code, json.loads(printed)) == (0, [])


def test_reap_to_a_new_consumer_prints_a_note(types: Typed, broker: BlockingBroker) -> None:
    code, _, stderr = types("consumers", "reap", "orders", "billing", "--idle", "0", "--to", "w9")

    assert code == 6
    assert "'w9', a new consumer" in stderr


def test_pending_entries_are_not_dropped_without_a_new_consumer(types: Typed, broker: BlockingBroker) -> None:
    code, _, stderr = types("consumers", "reap", "orders", "billing", "--idle", "0", "--yes")

    assert code == 1
    assert "Pass --to CONSUMER" in stderr


@pytest.mark.parametrize(
    ("line", "fact"),
    [
        ("streams add orders a=b --id 6-1", ("id", "6-1")),
        ("streams del orders 5-1 --yes", ("deleted", 1)),
        ("streams trim orders --max-len 0 --force --yes", ("trimmed", 1)),
        ("streams rm orders --yes", ("removed", True)),
        ("groups create orders billing --start 0", ("created", False)),
        ("groups reset orders billing --to-earliest --yes", ("position_id", "0-0")),
        ("groups rm orders billing --yes", ("removed", True)),
        ("pending ack orders billing 5-1 --yes", ("acknowledged", 1)),
        ("dlq purge orders --yes", ("would_purge", 0)),
        ("dlq replay orders", ("added", 0)),
        ("assignments announce service a", ("stream", "a")),
    ],
)
def test_changing_commands_print_json(
    types: Typed, broker: BlockingBroker, line: str, fact: tuple[str, object]
) -> None:
    code, printed, stderr = types(*line.split(), "-o", "json")

    assert code == 0, stderr
    assert json.loads(printed)[fact[0]] == fact[1]


def test_reaping_prints_removed_consumers_as_json(types: Typed, broker: BlockingBroker) -> None:
    code, printed, _ = types(
        "consumers", "reap", "orders", "billing", "--idle", "0", "--to", "w2", "--yes", "-o", "json"
    )

    assert (code, json.loads(printed)) == (0, [{"consumer": "w1", "handed_over": 1, "discarded": 0}])


def test_reaping_drops_entries_only_with_discard(types: Typed, broker: BlockingBroker) -> None:
    reap = ("consumers", "reap", "orders", "billing", "--idle", "0", "--discard")
    assert types(*reap, "--to", "w2", "--yes")[0] == USAGE

    code, printed, _ = types(*reap, "--yes", "-o", "json")

    assert code == 0
    assert {"consumer": "w1", "handed_over": 0, "discarded": 1} in json.loads(printed)
    assert broker.xpending("orders", "billing").count == 0


def test_pending_entries_can_be_shown_with_their_fields(types: Typed, broker: BlockingBroker) -> None:
    [held] = broker.xpending_range("orders", "billing", with_entries=True)
    assert held.fields is not None

    code, printed, _ = types("pending", "ls", "orders", "billing", "--entries", "-o", "json")

    assert code == 0
    assert json.loads(printed)[0]["fields"] == {name.decode(): value.decode() for name, value in held.fields.items()}
    broker.xdel("orders", held.id)
    assert json.loads(types("pending", "ls", "orders", "billing", "--entries", "-o", "json")[1])[0]["fields"] is None
    assert "(deleted)" in types("pending", "ls", "orders", "billing", "--entries")[1]


def test_errors_are_escaped_for_the_terminal(types: Typed, broker: BlockingBroker) -> None:
    """A server's error text contains the name unescaped."""
    evil = "evil\x1b]0;owned\x07\x9b31m"
    for words in (("streams", "describe", evil), ("groups", "describe", "orders", evil), ("dlq", "show", evil, "1-1")):
        code, _, stderr = types(*words)
        assert code == NOT_FOUND
        assert "\\x1b]0;owned\\x07" in stderr
        assert not {"\x1b", "\x07", "\x9b"} & set(stderr)


# --- small things that a newcomer meets first ---


def test_version_is_printed(types: Typed) -> None:
    assert types("--version") == (0, f"{__version__}\n", "")


def test_count_of_one_is_singular(types: Typed, broker: BlockingBroker) -> None:
    for words in (
        ("streams", "trim", "orders", "--max-len", "1"),
        ("streams", "rm", "orders"),
        ("streams", "del", "orders", "5-1"),
        ("groups", "rm", "orders", "billing"),
        ("groups", "reset", "orders", "billing", "--to-earliest"),
        ("consumers", "reap", "orders", "billing", "--idle", "0", "--to", "w2"),
        ("pending", "ack", "orders", "billing", "5-1"),
        ("doctor", "orders"),
    ):
        _, printed, stderr = types(*words)
        for text in (printed, stderr):
            assert not re.search(r"\b1 (\w+ )?(entries|consumers)", text), text


def test_invalid_start_of_a_group_lists_the_allowed_values(types: Typed) -> None:
    code, _, stderr = types("groups", "create", "orders", "billing", "--start", "beginning")

    assert code == USAGE
    assert "'$'" in stderr


def test_policy_without_limits_lists_the_options(types: Typed, broker: BlockingBroker) -> None:
    code, _, stderr = types("retention", "apply", "orders")

    assert code == USAGE
    assert "--max-age" in stderr
    assert "RetentionPolicy(" not in stderr


def test_time_before_all_entries_starts_at_the_first(types: Typed, broker: BlockingBroker) -> None:
    code, printed, _ = types("groups", "reset", "orders", "billing", "--to-datetime", "1960-01-01", "--yes")

    assert (code, printed) == (0, "moved to 0-0\n")


def test_single_snapshot_prints_no_key_hint(types: Typed, broker: BlockingBroker) -> None:
    code, printed, _ = types("top", "--once", "--interval", "0.2")

    assert code == 0
    assert "orders" in printed
    assert "1 stream " in printed
    assert "Ctrl-C" not in printed
    assert " d " not in printed, "5-1 is no time, so nothing has been pending since 1970"


def test_group_names_are_escaped_by_doctor(types: Typed, broker: BlockingBroker) -> None:
    broker.create_group("orders", "evil\x1b]0;owned\x07", start="0")

    _, printed, stderr = types("doctor", "orders")

    assert "evil\\x1b]0;owned\\x07" in printed
    assert not {"\x1b", "\x07"} & set(printed + stderr)


@pytest.mark.parametrize(
    "line",
    [
        "pending ls orders billing --idle inf",
        "pending ls orders billing --idle nan",
        "pending claim orders billing w2 5-1 --idle inf",
        "consumers reap orders billing --idle inf --yes",
        "top --once --interval inf",
        "dlq replay orders --rate nan",
        "dlq replay orders --rate 0",
        "streams tail orders -n 99999999999999999999",
        "streams trim orders --max-len 99999999999999999999 --yes",
    ],
)
def test_nan_and_infinity_are_refused(types: Typed, broker: BlockingBroker, line: str) -> None:
    code, printed, stderr = types(*line.split())

    assert (code, printed) == (USAGE, "")
    assert stderr


def test_policy_that_cannot_be_applied_fails(types: Typed, broker: BlockingBroker) -> None:
    code, printed, _ = types("retention", "apply", "plain", "orders", "--max-len", "5")

    assert code == FAILED
    assert "orders" in printed, "the others are done"


def test_unwritable_output_prints_no_traceback(redis_url: str) -> None:
    words = [sys.executable, "-c", "from millstream.cli.main import main; main()", "--help"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)

    assert done.returncode == FAILED
    assert "No space left" in done.stderr
    assert "Traceback" not in done.stderr


def test_user_without_info_sees_the_available_values(types: Typed, broker: BlockingBroker, redis_url: str) -> None:
    """The usual user of a service: its own keys, and no command of Redis's category ``dangerous``."""
    rules = b"ACL SETUSER service on >p ~orders* &* +@all -@dangerous".split()
    broker.transport.call(Command((*rules,)))
    url = redis_url.replace("redis://", "redis://service:p@")

    code, printed, _ = types("doctor", "--url", url)
    assert "not readable" in printed
    assert code in (0, FINDINGS)
    code, printed, _ = types("doctor", "orders", "--url", url)
    assert "{orders}.dlq" in printed
    code, printed, _ = types("top", "--once", "--interval", "0.2", "--url", url)
    assert code == 0
    assert "may not run INFO" in printed


def test_following_a_missing_stream_suggests_a_name(
    types: Typed, broker: BlockingBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(BlockingBroker, "xread", interrupted)
    assert types("streams", "tail", "orders", "--follow") == (130, "5-1  n=1\n", "")
    code, text, stderr_text = types("streams", "tail", "ordres", "--follow")
    assert (code, text) == (130, "")
    assert stderr_text.startswith("waiting for the first entry: there is no stream 'ordres'; did you mean 'orders'?")


@pytest.mark.parametrize("idle", ["0", "0s", "1ms"])
def test_idle_is_a_duration_or_a_number_of_seconds(types: Typed, broker: BlockingBroker, idle: str) -> None:
    entry = str(broker.xrange("orders")[0].id)
    time.sleep(0.002)
    assert types("pending", "claim", "orders", "billing", "w2", entry, "--idle", idle)[0] == 0
    time.sleep(0.002)
    assert entry in types("pending", "ls", "orders", "billing", "--idle", idle)[1]
    assert types("consumers", "reap", "orders", "billing", "--idle", idle, "--discard", "--yes")[0] == 0


def test_idle_filter_skips_recent_entries(types: Typed, broker: BlockingBroker) -> None:
    entry = str(broker.xrange("orders")[0].id)
    assert types("pending", "claim", "orders", "billing", "w2", entry, "--idle", "1h")[0] == NOT_FOUND
    assert types("consumers", "reap", "orders", "billing", "--idle", "1h", "--yes")[0] == 0
    assert [consumer.name for consumer in broker.group_info("orders")[0].consumers] == ["w1"]
    assert types("consumers", "reap", "orders", "billing", "--idle", "1 fortnight")[0] == USAGE


def test_trim_reports_entries_held_back_by_a_group(types: Typed, broker: BlockingBroker) -> None:
    assert "because a group still needs them" in types("streams", "trim", "orders", "--max-len", "0", "--yes")[1]
    assert "because a group still needs them" in types("streams", "trim", "orders", "--min-id", "9", "--yes")[1]
    broker.xack("orders", "billing", ["5-1"])
    assert "because" not in types("streams", "trim", "orders", "--max-len", "0", "--yes")[1]


def test_password_in_a_refused_url_is_not_printed(types: Typed) -> None:
    code, printed, stderr = types("streams", "ls", "--url", "local://u:s3cret@x")
    assert code == USAGE
    assert "s3cret" not in printed + stderr


def test_address_in_place_of_pipeline_files_is_printed_as_it_was_typed(types: Typed) -> None:
    code, _, stderr = types("pipeline", "ls", "http://127.0.0.1:9000")
    assert code == USAGE
    assert "http://127.0.0.1:9000" in stderr


@pytest.mark.parametrize("closed", [">&-", "<&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_are_no_error(redis_url: str, tmp_path: Path, closed: str) -> None:
    errors = "" if "2>" in closed else "2> errors"
    line = f'exec "{sys.executable}" -m millstream streams ls --url {redis_url} {closed} {errors}'
    ended = subprocess.run(["bash", "-c", line], cwd=tmp_path, stdout=subprocess.PIPE, check=False, timeout=60)
    assert ended.returncode == 0
    if errors:
        assert "Traceback" not in (tmp_path / "errors").read_text()


@pytest.mark.parametrize("line", ["streams ls", "groups ls", "doctor", "top --once", "retention apply * --max-len 9"])
def test_stream_with_an_empty_name_does_not_hide_the_other_streams(
    broker: BlockingBroker, types: Typed, line: str
) -> None:
    broker.transport.call(Command((b"XADD", b"", b"*", b"n", b"1"), b""))

    code, stderr, _ = types(*line.split(), "-o", "json")

    assert code in (0, FINDINGS)
    assert json.loads(stderr)
