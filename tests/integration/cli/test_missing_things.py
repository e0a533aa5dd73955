"""Commands that name something which is not there: the documented exit code, and what to type next."""

from __future__ import annotations

import json
import re
import subprocess
import sys
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
def test_what_is_not_there_is_said_to_be_missing(types: Typed, broker: BlockingBroker, line: str, says: str) -> None:
    code, printed, said = types(*line.split())

    assert (code, printed) == (NOT_FOUND, ""), said
    assert says in said
    assert "create_group" not in said, "that is Python, and a shell is typed into"
    assert ".." not in said
    assert [one.id for one in broker.xrange("orders")] == [(5, 1)]
    assert broker.list_streams() == ["orders"]
    assert broker.xpending("orders", "billing").count == 1


def test_a_stream_that_is_not_announced_is_not_released(types: Typed, broker: BlockingBroker) -> None:
    assert types("assignments", "announce", "service", "a")[0] == 0

    code, _, said = types("assignments", "release", "service", "b", "--yes")

    assert code == NOT_FOUND
    assert "millstream assignments ls service" in said


def test_a_stream_that_no_member_ever_owned_can_be_released(types: Typed, broker: BlockingBroker) -> None:
    assert types("assignments", "announce", "service", "a")[0] == 0

    code, printed, said = types("assignments", "release", "service", "a", "--yes")

    assert (code, "nobody owned it" in printed + said) == (0, True)


@pytest.mark.parametrize("line", ["streams ls", "dlq ls", "retention apply s --max-len 1", "top --once", "doctor"])
@pytest.mark.parametrize("url", ["local://", "local://name"])
def test_a_broker_in_memory_is_nothing_to_look_at(types: Typed, line: str, url: str) -> None:
    code, printed, said = types(*line.split(), "--url", url)

    assert (code, printed) == (USAGE, "")
    assert "nothing to look at" in said
    assert "local:///path" in said


def test_a_key_of_another_kind_is_not_called_missing(types: Typed, broker: BlockingBroker) -> None:
    code, _, said = types("streams", "describe", "plain")

    assert code == 1
    assert "WRONGTYPE" in said


@pytest.mark.parametrize("line", ["streams ls miss*", "groups ls miss*", "dlq ls orders", "dlq ls"])
def test_nothing_is_an_answer_where_nothing_was_named(types: Typed, broker: BlockingBroker, line: str) -> None:
    assert types(*line.split())[0] == 0
    code, printed, _ = types(*line.split(), "-o", "json")
    assert (code, json.loads(printed)) == (0, [])


def test_who_gets_a_dead_ones_work_may_be_new_and_is_told(types: Typed, broker: BlockingBroker) -> None:
    code, _, said = types("consumers", "reap", "orders", "billing", "--idle", "0", "--to", "w9")

    assert code == 6
    assert "'w9', whom the group does not know yet" in said


def test_work_without_an_heir_is_not_thrown_away(types: Typed, broker: BlockingBroker) -> None:
    code, _, said = types("consumers", "reap", "orders", "billing", "--idle", "0", "--yes")

    assert code == 1
    assert "Pass --to CONSUMER" in said


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
def test_what_changes_something_can_tell_programs_so(
    types: Typed, broker: BlockingBroker, line: str, fact: tuple[str, object]
) -> None:
    code, printed, said = types(*line.split(), "-o", "json")

    assert code == 0, said
    assert json.loads(printed)[fact[0]] == fact[1]


def test_reaping_tells_programs_who_went(types: Typed, broker: BlockingBroker) -> None:
    code, printed, _ = types(
        "consumers", "reap", "orders", "billing", "--idle", "0", "--to", "w2", "--yes", "-o", "json"
    )

    assert (code, json.loads(printed)) == (0, [{"consumer": "w1", "handed_over": 1, "discarded": 0}])


def test_reaping_throws_away_only_where_it_is_told_to(types: Typed, broker: BlockingBroker) -> None:
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


def test_errors_cannot_touch_the_terminal(types: Typed, broker: BlockingBroker) -> None:
    """A server's error text holds the name as it is."""
    evil = "evil\x1b]0;owned\x07\x9b31m"
    for words in (("streams", "describe", evil), ("groups", "describe", "orders", evil), ("dlq", "show", evil, "1-1")):
        code, _, said = types(*words)
        assert code == NOT_FOUND
        assert "\\x1b]0;owned\\x07" in said
        assert not {"\x1b", "\x07", "\x9b"} & set(said)


# --- small things that a newcomer meets first ---


def test_the_version(types: Typed) -> None:
    assert types("--version") == (0, f"{__version__}\n", "")


def test_one_entry_is_one_entry(types: Typed, broker: BlockingBroker) -> None:
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
        _, printed, said = types(*words)
        for text in (printed, said):
            assert not re.search(r"\b1 (\w+ )?(entries|consumers)", text), text


def test_where_a_group_may_start_is_said(types: Typed) -> None:
    code, _, said = types("groups", "create", "orders", "billing", "--start", "beginning")

    assert code == USAGE
    assert "'$'" in said


def test_a_policy_without_limits_says_which_options_there_are(types: Typed, broker: BlockingBroker) -> None:
    code, _, said = types("retention", "apply", "orders")

    assert code == USAGE
    assert "--max-age" in said
    assert "RetentionPolicy(" not in said


def test_a_time_before_all_entries_is_the_beginning(types: Typed, broker: BlockingBroker) -> None:
    code, printed, _ = types("groups", "reset", "orders", "billing", "--to-datetime", "1960-01-01", "--yes")

    assert (code, printed) == (0, "moved to 0-0\n")


def test_a_look_that_ends_does_not_say_how_to_end_it(types: Typed, broker: BlockingBroker) -> None:
    code, printed, _ = types("top", "--once", "--interval", "0.2")

    assert code == 0
    assert "orders" in printed
    assert "1 stream " in printed
    assert "Ctrl-C" not in printed
    assert " d " not in printed, "5-1 is no time, so nothing has been pending since 1970"


def test_groups_names_cannot_touch_the_terminal_in_doctor(types: Typed, broker: BlockingBroker) -> None:
    broker.create_group("orders", "evil\x1b]0;owned\x07", start="0")

    _, printed, said = types("doctor", "orders")

    assert "evil\\x1b]0;owned\\x07" in printed
    assert not {"\x1b", "\x07"} & set(printed + said)


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
def test_numbers_that_are_none_are_refused(types: Typed, broker: BlockingBroker, line: str) -> None:
    code, printed, said = types(*line.split())

    assert (code, printed) == (USAGE, "")
    assert said


def test_a_policy_that_cannot_be_applied_is_a_failure(types: Typed, broker: BlockingBroker) -> None:
    code, printed, _ = types("retention", "apply", "plain", "orders", "--max-len", "5")

    assert code == FAILED
    assert "orders" in printed, "the others are done"


def test_an_output_that_cannot_be_written_is_no_reason_to_show_our_insides(redis_url: str) -> None:
    words = [sys.executable, "-c", "from millstream.cli.main import main; main()", "--help"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)

    assert done.returncode == FAILED
    assert "No space left" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_user_who_may_not_ask_for_everything_is_told_what_there_is(
    types: Typed, broker: BlockingBroker, redis_url: str
) -> None:
    """The usual user of a service: its own keys, and nothing that Redis calls dangerous."""
    rules = b"ACL SETUSER service on >p ~orders* &* +@all -@dangerous".split()
    broker.link.call(Command((*rules,)))
    url = redis_url.replace("redis://", "redis://service:p@")

    code, printed, _ = types("doctor", "--url", url)
    assert "not readable" in printed
    assert code in (0, FINDINGS)
    code, printed, _ = types("doctor", "orders", "--url", url)
    assert "{orders}.dlq" in printed
    code, printed, _ = types("top", "--once", "--interval", "0.2", "--url", url)
    assert code == 0
    assert "no right to INFO" in printed


def test_who_follows_a_stream_that_is_not_there_is_told_so_and_which_was_meant(
    types: Typed, broker: BlockingBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(BlockingBroker, "xread", interrupted)
    assert types("streams", "tail", "orders", "--follow") == (130, "5-1  n=1\n", "")
    code, shown, told = types("streams", "tail", "ordres", "--follow")
    assert (code, shown) == (130, "")
    assert told.startswith("waiting for its first entry: there is no stream 'ordres'; did you mean 'orders'?")
