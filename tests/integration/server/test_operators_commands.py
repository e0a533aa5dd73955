"""Commands of operators and their tools, compared with a real redis-server where both support them."""

from __future__ import annotations

import pytest
import redis
from raw_client import Client

from millstream.broker.embedded import Embedded
from millstream.testing import RedisProcess, wait_until
from millstream.testing.servers import ServeProcess
from millstream.wire.commands import ErrorReply


@pytest.fixture(scope="module")
def ours():
    with ServeProcess(["--enable-debug-command"]) as process:
        yield process


@pytest.fixture(scope="module")
def theirs(shared_redis):
    with RedisProcess(["--enable-debug-command", "yes"]) as server:
        yield server


ALIKE = [
    "ACL WHOAMI",
    "ACL USERS",
    "ACL LIST",
    "ACL LOG",
    "ACL LOG 0",
    "ACL LOG -1",
    "ACL LOG x",
    "ACL LOG RESET",
    "ACL LOG 1 2",
    "ACL GETUSER default",
    "ACL GETUSER absent",
    "ACL GETUSER",
    "MODULE LIST",
    "MODULE LIST x",
    "CONFIG SET slowlog-log-slower-than 3600000000",  # otherwise pauses of a busy machine would be included
    "SLOWLOG RESET",
    "SLOWLOG LEN",
    "SLOWLOG GET",
    "SLOWLOG GET -1",
    "SLOWLOG GET -2",
    "SLOWLOG GET x",
    "SLOWLOG FOO",
    "CONFIG SET slowlog-log-slower-than -1",
    "CONFIG SET slowlog-log-slower-than -2",
    "CONFIG SET slowlog-log-slower-than x",
    "CONFIG GET slowlog-*",
    "CONFIG SET slowlog-max-len -1",
    "CONFIG SET slowlog-max-len 5",
    "CONFIG GET slowlog-*",
    "CONFIG SET slowlog-log-slower-than 10000",
    "LATENCY LATEST",
    "LATENCY HISTORY command",
    "LATENCY HISTORY",
    "LATENCY RESET",
    "LATENCY RESET a b",
    "LATENCY HISTOGRAM nothing",
    "CONFIG SET latency-monitor-threshold -1",
    "CONFIG SET latency-monitor-threshold 100000",
    "CONFIG GET latency-monitor-threshold",
    "CONFIG SET latency-monitor-threshold 0",
    "CONFIG SET appendonly maybe",
    "CONFIG SET appendonly no",
    "CONFIG GET appendonly",
    "DEBUG SLEEP",
    "DEBUG SLEEP 0",
    "DEBUG SLEEP x",
    "DEBUG SLEEP -1",
    "DEBUG SLEEP 1 2",
    "CLUSTER INFO",
    "CLUSTER NODES",
    "CLUSTER SLOTS",
]


@pytest.mark.parametrize("protocol", [2, 3])
def test_replies_equal_those_of_redis(ours, theirs, protocol):
    with Client(ours.port) as mine, Client(theirs.port) as other:
        for client in (mine, other):
            client.ask("HELLO", protocol)
        for line in ALIKE:
            answers = [in_one_order(line, client.ask(*line.split())) for client in (mine, other)]
            assert answers[0] == answers[1], line


def in_one_order(line, answer):
    """Redis keeps its settings in a hash with a random seed at every start."""
    if line.startswith("CONFIG GET") and isinstance(answer, list):
        return dict(zip(answer[::2], answer[1::2], strict=True))
    return answer


def test_debug_is_off_unless_it_is_turned_on(connect, redis_server):
    with Client(redis_server.port) as other:
        assert connect().ask("DEBUG", "SLEEP", 0) == other.ask("DEBUG", "SLEEP", 0)


def test_slow_log_has_the_format_of_redis_and_no_passwords(ours, theirs):
    for port in (ours.port, theirs.port):
        with Client(port) as client:
            client.ask("CLIENT", "SETNAME", "me")
            client.ask("SLOWLOG", "RESET")
            client.ask("CONFIG", "SET", "slowlog-log-slower-than", 0)
            client.ask("SET", "k", "x" * 300)
            client.ask("DEL", *range(100))
            client.ask("AUTH", "wrong", "canary")
            client.ask("CONFIG", "SET", "slowlog-log-slower-than", -1)
            entries = {entry[3][0]: entry for entry in client.ask("SLOWLOG", "GET", -1)}
            assert entries[b"SET"][3] == [b"SET", b"k", b"x" * 128 + b"... (172 more bytes)"]
            assert len(entries[b"DEL"][3]) == 32
            assert entries[b"DEL"][3][-1] == b"... (70 more arguments)"
            assert entries[b"DEL"][5] == b"me"
            assert b"canary" not in b"".join(word for entry in entries.values() for word in entry[3])
            assert client.ask("SLOWLOG", "RESET") == b"OK"


def test_latency_spike_is_recorded(ours, theirs):
    for port in (ours.port, theirs.port):
        with Client(port) as client:
            # More than a busy machine takes for the commands around it.
            client.ask("CONFIG", "SET", "latency-monitor-threshold", 500)
            client.ask("DEBUG", "SLEEP", "0.55")
            ((event, second, took, worst),) = client.ask("LATENCY", "LATEST")
            assert event == b"command"
            assert took == worst >= 550
            assert client.ask("LATENCY", "HISTORY", "command") == [[second, took]]
            assert b"command" in client.ask("LATENCY", "DOCTOR")
            assert client.ask("LATENCY", "RESET", "command") == 1
            client.ask("CONFIG", "SET", "latency-monitor-threshold", 0)


def test_wrong_passwords_are_in_the_acl_log(theirs):
    with ServeProcess(["--password", "right"]) as process:
        theirs_client, ours_client = Client(theirs.port), Client(process.port)
        ours_client.ask("AUTH", "right")
        for client, port in ((ours_client, process.port), (theirs_client, theirs.port)):
            client.ask("ACL", "LOG", "RESET")
            with Client(port) as guesser:
                for _ in range(3):
                    guesser.ask("AUTH", "bob", "guess")
            (entry,) = client.ask("ACL", "LOG")
            facts = dict(zip(entry[::2], entry[1::2], strict=True))
            assert list(facts) == [
                b"count", b"reason", b"context", b"object", b"username", b"age-seconds", b"client-info",
            ]  # fmt: skip
            assert [facts[name] for name in (b"count", b"reason", b"context", b"object", b"username")] == [
                3, b"auth", b"toplevel", b"AUTH", b"bob",
            ]  # fmt: skip
            assert b"guess" not in facts[b"client-info"]
            client.close()


def test_blocked_command_that_fails_later_counts_as_failed(ours, theirs):
    for port in (ours.port, theirs.port):
        with Client(port) as waiting, Client(port) as other:
            other.ask("DEL", "s")
            other.ask("XGROUP", "CREATE", "s", "g", "$", "MKSTREAM")
            other.ask("CONFIG", "RESETSTAT")
            for end in (("DEL", "s"), ("CLIENT", "UNBLOCK", waiting.ask("CLIENT", "ID"), "ERROR")):
                other.ask("XGROUP", "CREATE", "s", "g", "$", "MKSTREAM")
                waiting.send("XREADGROUP", "GROUP", "g", "c", "BLOCK", 0, "STREAMS", "s", ">")
                wait_until(lambda other=other: b"blocked_clients:1" in other.ask("INFO", "clients"))
                other.ask(*end)
                assert isinstance(waiting.take(), ErrorReply)
            stats = other.ask("INFO", "commandstats").decode()
            line = next(line for line in stats.splitlines() if line.startswith("cmdstat_xreadgroup:"))
            assert "calls=2," in line
            assert line.endswith("failed_calls=2")


def test_journal_can_be_turned_off_and_on(tmp_path):
    with ServeProcess(["--dir", tmp_path]) as process:
        client = redis.Redis(port=process.port)
        client.set("before", 1)
        client.config_set("appendonly", "no")
        assert client.info("persistence")["aof_enabled"] == 0
        client.set("meanwhile", 1)
        with pytest.raises(redis.ResponseError, match="appendonly"):
            client.bgrewriteaof()
        client.config_set("appendonly", "yes")
        client.set("after", 1)
        process.kill()
    with ServeProcess(["--dir", tmp_path]) as again:
        assert sorted(redis.Redis(port=again.port).keys()) == [b"after", b"before", b"meanwhile"]


def test_journal_cannot_be_enabled_without_a_directory():
    embedded = Embedded(housekeeping=False)
    reply = embedded.execute(embedded.session(), (b"CONFIG", b"SET", b"appendonly", b"yes"))
    assert isinstance(reply, ErrorReply)
    assert "--dir" in reply.text
    text = embedded.execute(embedded.session(), (b"CONFIG", b"GET", b"appendonly"))
    assert list(text) == [b"appendonly", b"no"]
    embedded.close()


INSIGHT = [
    "INFO",
    "INFO server",
    "INFO keyspace",
    "CLIENT SETNAME redisinsight-browser-1",
    "CLIENT LIST",
    "COMMAND",
    "COMMAND COUNT",
    "COMMAND DOCS",
    "MODULE LIST",
    "ACL WHOAMI",
    "ACL LIST",
    "CONFIG GET databases",
    "CONFIG GET slowlog*",
    "CONFIG GET maxmemory",
    "CONFIG GET notify-keyspace-events",
    "DBSIZE",
    "SCAN 0 MATCH * COUNT 500 TYPE stream",
    "TYPE s",
    "TTL s",
    "PTTL s",
    "EXISTS s",
    "MEMORY USAGE s SAMPLES 0",
    "OBJECT ENCODING s",
    "XLEN s",
    "XINFO STREAM s",
    "XINFO STREAM s FULL",
    "XINFO GROUPS s",
    "XINFO CONSUMERS s g",
    "XPENDING s g",
    "XPENDING s g - + 50",
    "XRANGE s - + COUNT 50",
    "XREVRANGE s + - COUNT 50",
    "STRLEN k",
    "GET k",
    "HLEN h",
    "HSCAN h 0 COUNT 500",
    "LLEN l",
    "LRANGE l 0 500",
    "SCARD set",
    "SSCAN set 0 COUNT 500",
    "ZCARD z",
    "ZRANGE z 0 -1 WITHSCORES",
    "SLOWLOG GET 50",
    "SLOWLOG LEN",
    "LATENCY LATEST",
    "PUBSUB CHANNELS",
    "PUBSUB NUMSUB",
    "MEMORY STATS",
    "MEMORY DOCTOR",
    "CLIENT ID",
    "CLIENT GETNAME",
    "SELECT 1",
    "SELECT 0",
    "PING",
]


@pytest.mark.parametrize("protocol", [2, 3])
def test_commands_of_key_browsers_get_replies_in_the_shape_of_redis(ours, theirs, protocol):
    """The commands that Redis Insight sends when a user connects and browses: no errors, and the reply types of
    Redis."""
    with Client(ours.port) as mine, Client(theirs.port) as other:
        for client in (mine, other):
            client.ask("HELLO", protocol)
            client.ask("FLUSHALL")
            for line in ("SET k v", "HSET h a b", "RPUSH l a", "SADD set a", "ZADD z 1 a", "XADD s 1-1 a b"):
                client.ask(*line.split())
            client.ask("XGROUP", "CREATE", "s", "g", "0")
            client.ask("XREADGROUP", "GROUP", "g", "c", "STREAMS", "s", ">")
        for line in INSIGHT:
            answer, expected = mine.ask(*line.split()), other.ask(*line.split())
            assert type(answer) is type(expected), line
            assert not isinstance(answer, ErrorReply), line
