"""What 0.1.0 left behind, and 0.1.0 itself beside this version: its journal, its markers, its workers and its clients.

``previous/0.1.0`` was made by that version: ``journal.aof`` by its embedded broker, ``scripts.json`` holds its scripts.
A worker of that version is played by redis-py, which sends what that version sent.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from millstream import BlockingBroker, EntryId, open_blocking_broker
from millstream.broker import beside, delayed, migrate, recovery, settle
from millstream.broker.steps.script import all_names, guarded_form, script
from millstream.broker.steps.twins import previous_twins
from millstream.errors import NonDeterministicReplay, StaleWriter
from millstream.testing import RedisProcess, ServedBroker

LEFT = Path(__file__).parents[1] / "previous" / "0.1.0"
SCRIPTS: dict[str, str] = json.loads((LEFT / "scripts.json").read_text())
ROWS = [{"row": n} for n in range(5)]
HOUR = 3_600_000


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    shutil.copy(LEFT / "journal.aof", tmp_path / "journal.aof")
    return tmp_path


@pytest.fixture(params=["server", "redis"])
def server(request: pytest.FixtureRequest, redis_server: RedisProcess) -> Iterator[str]:
    """A server that both versions share: ours, and Redis."""
    if request.param == "redis":
        yield redis_server.url
    else:
        with ServedBroker() as ours:
            yield ours.url


class OldWorker:
    """A member or client of 0.1.0: it calls its scripts by their digests, and loads those that are not known."""

    def __init__(self, url: str) -> None:
        self._client = redis.Redis.from_url(url, protocol=2)

    def script(self, name: str, keys: list[Any], *argv: Any) -> Any:
        source = SCRIPTS[name]
        sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
        try:
            return self._client.evalsha(sha, len(keys), *keys, *argv)
        except redis.exceptions.NoScriptError:
            self._client.script_load(source)
            return self._client.evalsha(sha, len(keys), *keys, *argv)

    def ask(self, *words: Any) -> Any:
        return self._client.execute_command(*words)


def test_its_journal_is_read_and_gone_on_with(journal: Path) -> None:
    with open_blocking_broker(f"local://{journal}", max_stream_len=None) as broker:
        look(broker)
        broker.xadd("orders", {"n": "new"})
    with open_blocking_broker(f"local://{journal}", max_stream_len=None) as broker:
        assert broker.xrevrange("orders", count=1)[0].fields == {b"n": b"new"}


def test_its_journal_moves_to_a_redis(journal: Path, redis_server: RedisProcess) -> None:
    migrate(f"local://{journal}", redis_server.url)
    with open_blocking_broker(redis_server.url) as broker:
        look(broker)


def look(broker: BlockingBroker) -> None:
    """Everything that the old version left is there, and works."""
    assert [entry.fields[b"n"] for entry in broker.xrange("orders")] == [b"%d" % n for n in range(20)]
    held = broker.xpending_range("orders", "g")
    assert [(one.id.ms, one.consumer, one.times_delivered) for one in held] == [
        (ms, "old worker", 1) for ms in (4, 5, 6, 7)
    ]
    assert [letter.fields for letter in broker.xrange(beside("orders", "dlq"))] == [{b"why": b"tired"}]

    # Its marker: the same rows are not stored again, others are refused, and so is a version before.
    assert broker.append_once("rows", "job", 3, 0, ROWS).skipped == 5
    with pytest.raises(NonDeterministicReplay):
        broker.append_once("rows", "job", 3, 0, [{"row": "other"}, *ROWS[1:]])
    with pytest.raises(StaleWriter):
        broker.append_once("rows", "job", 2, 0, ROWS)
    assert broker.append_once("rows", "job", 3, 0, [*ROWS, {"row": 5}]).added == 1
    assert broker.xlen("rows") == 6

    # Its event ids, its delayed delivery and its delayed messages.
    assert broker.append_unique("events", [("a", {"event": "again"}), ("c", {"event": "c"})]).added == 1
    assert [one.id for one in broker.run(recovery.take_due, "orders", "g", "new worker").deliveries] == [EntryId(4)]
    assert broker.run(delayed.publish_due, "orders")[0] == 1
    assert broker.xrevrange("orders", count=1)[0].fields == {b"n": b"later"}
    assert broker.xdel("orders", broker.xrevrange("orders", count=1)[0].id) == 1


def test_every_script_of_the_version_before_is_known() -> None:
    today = {one.sha for name in all_names() for one in (script(name), guarded_form(script(name)))}
    theirs = {hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest().encode() for text in SCRIPTS.values()}

    assert theirs - today == set(previous_twins())


def test_old_and_new_workers_share_a_group(server: str) -> None:
    old = OldWorker(server)
    with open_blocking_broker(server) as new:
        new.xadd_many("s", [{"n": n} for n in range(40)])
        new.create_group("s", "g", start="0")
        due = beside("s", "due:g")
        handled = []
        while len(handled) < 40:
            theirs = old.ask("XREADGROUP", "GROUP", "g", "old", "COUNT", 3, "STREAMS", "s", ">")
            ids = [entry for entry, _ in theirs[0][1]] if theirs else []
            if ids:
                assert old.script("settle", ["s", due], "g", "old", 1, "touch", 0, *ids) == [[], 1, []]
                assert old.script("settle", ["s", due], "g", "old", 1, "ack", 0, *ids[1:]) == [[], 1, []]
                assert old.script("settle", ["s", due], "g", "old", 1, "back", 0, ids[0]) == [[], 1, []]
                handled += [EntryId.parse(one) for one in ids[1:]]
            ours = [one.id for one in new.xreadgroup("s", "g", "new", count=3)]
            # What the old worker handed back the new one finds, and the other way round.
            swept = new.run(recovery.sweep, "s", "g", "new", min_idle_ms=HOUR)
            ours_again = [one.id for one in swept.deliveries]
            if ours:
                new.run(settle.hand_back, "s", "g", "new", ours[:1], times_delivered=1, leaving=0)
                new.run(settle.ack_held, "s", "g", "new", ours[1:], times_delivered=1)
                handled += ours[1:]
            new.run(settle.ack_held, "s", "g", "new", ours_again, times_delivered=1)
            handled += ours_again
            _, found, gone = old.script("sweep", ["s", due], "g", "old", HOUR, "0-0", 100, 100, 1 << 40, "")
            again = [entry for entry, _, _ in found]
            if again:
                assert old.script("settle", ["s", due], "g", "old", 1, "ack", 0, *again) == [[], 1, []]
            handled += [EntryId.parse(one) for one in again]
            assert gone == []

        assert sorted(handled) == [entry.id for entry in new.xrange("s")]
        assert new.xpending("s", "g").count == 0


def test_old_and_new_writers_of_one_marker_store_each_row_once(server: str) -> None:
    old = OldWorker(server)
    keys = ["s", beside("s", "once:job")]
    with open_blocking_broker(server) as new:
        first = old.script("append_once", keys, "0", 1, 0, "-", "-", HOUR, 0, 2, "row", 0, 2, "row", 1)
        assert first[0] == b"OK"
        assert new.append_once("s", "job", 1, 2, [{"row": 2}]).added == 1
        refused = old.script("append_once", keys, "0", 1, 2, "-", "-", HOUR, 0, 2, "row", 2)
        assert refused[:2] == [b"ROWS", b"3"]
        assert new.append_once("s", "job", 1, 0, [{"row": n} for n in range(3)]).skipped == 3
        assert [entry.fields[b"row"] for entry in new.xrange("s")] == [b"0", b"1", b"2"]


def test_old_and_new_publishers_delay_and_move_each_others_messages(server: str) -> None:
    old = OldWorker(server)
    later, done = beside("s", "later"), beside("s", "later.done")
    message = b"".join(b"%d:%b" % (len(part), part) for part in (b"old token", b"n", b"old"))
    with open_blocking_broker(server) as new:
        for _ in range(2):
            old.script("later_add", [later, done], 0, "old token", message)
            new.run(delayed.publish_later, "s", [("new token", {"n": "new"})], delay_ms=0)
        assert old.script("later_move", ["s", later, done], 1, HOUR)[1] == 0
        assert new.run(delayed.publish_due, "s") == (1, None)
        assert old.script("later_add", [later, done], 0, "old token", message) == 0
        assert sorted(entry.fields[b"n"] for entry in new.xrange("s")) == [b"new", b"old"]


def test_old_and_new_keep_each_others_event_ids(server: str) -> None:
    old = OldWorker(server)
    keys = ["s", *(beside("s", suffix) for suffix in ("seen.a", "seen.b", "seen.t"))]
    with open_blocking_broker(server) as new:
        assert old.script("append_unique", keys, HOUR, 0, "e", 2, "n", 1)[0] is not None
        assert new.append_unique("s", [("e", {"n": 2}), ("f", {"n": 3})]).added == 1
        assert old.script("append_unique", keys, HOUR, 0, "f", 2, "n", 4) == [None]
        assert new.xlen("s") == 2


def test_the_gate_of_an_old_bulk_writer_works(server: str) -> None:
    """0.1.0's Spark sink sends both scripts as text, in one transaction with its rows."""
    client = redis.Redis.from_url(server, protocol=2)
    keys = ["s", beside("s", "once:q"), beside("s", "once.gate")]
    head = ("0", 1, 0, "-", "-", HOUR, 2)
    for expected in ([b"OK"], [b"ROWS", b"2"]):
        with client.pipeline(transaction=True) as turn:
            turn.eval(SCRIPTS["once_open"], 3, *keys, *head)
            turn.execute_command("XSETID", keys[2], "18446744073709551615-18446744073709551615")
            turn.execute_command("XADD", "s", "*", "n", 1)
            turn.execute_command("XADD", "s", "*", "n", 2)
            turn.eval(SCRIPTS["once_close"], 3, *keys, *head)
            turn.execute_command("DEL", keys[2])
            replies = turn.execute(raise_on_error=False)
        assert replies[0][: len(expected)] == expected
    assert client.xlen("s") == 2
    with open_blocking_broker(server) as new:
        assert new.append_once("s", "q", 1, 2, [{"n": 3}]).added == 1
