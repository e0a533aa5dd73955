"""Connections: passwords, names, client lists, CLIENT KILL, MONITOR and INFO."""

from __future__ import annotations

import pytest
from driving import Driver, wait_for_list

from millstream.engine import admission
from millstream.engine.engine import Hooks
from millstream.wire.commands import OK, ErrorReply, Several, Status

NOAUTH = "NOAUTH Authentication required."
WRONGPASS = "WRONGPASS invalid username-password pair or user is disabled."


@pytest.fixture
def locked() -> Driver:
    return Driver(password=b"secret")


def test_only_login_commands_are_allowed_before_auth(locked: Driver) -> None:
    for line in ("GET a", "PING", "CLIENT ID", "MULTI", "SUBSCRIBE a", "COMMAND", "INFO"):
        assert locked.error(line) == NOAUTH
    assert locked.error("EXEC") == f"EXECABORT Transaction discarded because of: {NOAUTH}"
    assert locked.error("NOSUCH").startswith("ERR unknown command")
    assert locked.error("HELLO 3").startswith("NOAUTH HELLO must be called with the client already authenticated")
    assert locked.main.protocol == 2


def test_correct_password_authenticates(locked: Driver) -> None:
    assert locked.error("AUTH wrong") == WRONGPASS
    assert locked.error("AUTH other secret") == WRONGPASS
    assert locked.say("AUTH secret") == OK
    assert locked.say("GET a") is None
    assert locked.say("RESET") == Status(b"RESET")
    assert locked.error("GET a") == NOAUTH
    assert locked.say("AUTH default secret") == OK
    assert not locked.main.special


def test_hello_accepts_a_password(locked: Driver) -> None:
    assert locked.error("HELLO 3 AUTH default wrong") == WRONGPASS
    assert locked.say("HELLO 3 AUTH default secret SETNAME me")[5] == 3
    assert locked.say("CLIENT GETNAME") == b"me"


def test_embedding_process_needs_no_password(locked: Driver) -> None:
    trusted = locked.engine.session(trusted=True)
    assert locked.say("SET a 1", trusted) == OK


def test_quit_is_answered_and_then_closes(locked: Driver) -> None:
    assert locked.say("QUIT") == OK
    assert locked.main.closing


def test_client_list_has_a_line_per_client() -> None:
    driver = Driver()
    other = driver.engine.session(address=b"127.0.0.1:4000")
    driver.say("CLIENT SETNAME reader", other)
    driver.say("CLIENT SETINFO LIB-NAME somelib", other)
    driver.say("SUBSCRIBE a b", other)
    driver.now_ms += 5000
    lines = driver.say("CLIENT LIST").decode().splitlines()
    assert len(lines) == 2
    facts = dict(word.split("=", 1) for word in lines[1].split(" "))
    assert facts["addr"] == "127.0.0.1:4000"
    assert facts["name"] == "reader"
    assert facts["age"] == facts["idle"] == "5"
    assert facts["flags"] == "P"
    assert facts["sub"] == "2"
    assert facts["cmd"] == "subscribe"
    assert facts["lib-name"] == "somelib"
    assert driver.say(f"CLIENT LIST ID {other.id}").decode().splitlines() == lines[1:]
    assert driver.say("CLIENT LIST TYPE pubsub").decode().splitlines() == lines[1:]


def test_killed_client_is_reported_to_be_closed() -> None:
    driver = Driver()
    victim = driver.engine.session(address=b"1.2.3.4:5")
    assert driver.say(f"CLIENT KILL ID {victim.id}") == 1
    assert driver.engine.take_outbox() == [(victim, Several())]
    assert victim.closing
    assert not driver.main.closing
    other = driver.engine.session(address=b"1.2.3.4:6")
    assert driver.say("CLIENT KILL 1.2.3.4:6") == OK
    assert other.closing
    assert driver.say("CLIENT KILL TYPE normal SKIPME no") == 1
    assert driver.main.closing


def test_entry_for_a_killed_client_goes_to_the_next_reader() -> None:
    driver = Driver()
    driver.add_command(b"WAITPOP", wait_for_list)
    victim, successor = driver.session(), driver.session()
    driver.say("WAITPOP a 0", victim)
    driver.say("WAITPOP a 0", successor)
    driver.say(f"CLIENT KILL ID {victim.id}")
    driver.say("RPUSH a 1")
    assert driver.engine.take_outbox() == [(victim, Several()), (successor, [b"a", b"1"])]


def test_monitor_shows_commands_of_other_clients_without_secrets() -> None:
    driver = Driver()
    monitor = driver.session()
    assert driver.say("MONITOR", monitor) == OK
    driver.main.address = b"127.0.0.1:9"
    driver.send((b"set", b"a", b'\x00"\n'))
    driver.say("AUTH default secret")
    driver.say("CONFIG GET maxmemory")
    driver.say("MULTI")
    driver.say("GET a")
    driver.say("EXEC")
    name = driver.engine.register_script(b"get", lambda call, keys, argv: call(b"GET", b"a"))
    driver.send((b"EVALSHA", name, b"0"))
    stamp = b"%d.000000" % (driver.now_ms // 1000)
    assert driver.heard(monitor) == [
        Status(stamp + b' [0 127.0.0.1:9] "set" "a" "\\x00\\"\\n"'),
        Status(stamp + b' [0 127.0.0.1:9] "MULTI"'),
        Status(stamp + b' [0 127.0.0.1:9] "GET" "a"'),
        Status(stamp + b' [0 127.0.0.1:9] "EXEC"'),
        Status(stamp + b' [0 127.0.0.1:9] "EVALSHA" "' + name + b'" "0"'),
        Status(stamp + b' [0 lua] "GET" "a"'),
    ]
    driver.engine.drop(monitor)
    driver.say("GET a")
    assert driver.engine.take_outbox() == []
    assert not driver.main.special


def test_commands_are_counted_by_outcome() -> None:
    driver = Driver()
    driver.say("SET a x")
    driver.say("INCR a")
    driver.say("INCR")
    driver.say("NOSUCH")
    driver.say("client id")
    text = driver.say("INFO commandstats").decode()
    assert "cmdstat_set:calls=1,usec=0,usec_per_call=0.00,rejected_calls=0,failed_calls=0" in text
    assert "cmdstat_incr:calls=1,usec=0,usec_per_call=0.00,rejected_calls=1,failed_calls=1" in text
    assert "cmdstat_client|id:calls=1," in text
    assert "errorstat_ERR:count=3" in driver.say("INFO errorstats").decode()
    driver.say("CONFIG RESETSTAT")
    assert driver.say("INFO errorstats") == b"# Errorstats\r\n"


def test_info_returns_the_requested_sections() -> None:
    driver = Driver(hooks=Hooks(persistence=lambda: {"aof_enabled": 1, "aof_base_size": 7}))
    driver.say("SET a 1 EX 100")
    assert driver.say("INFO keyspace") == b"# Keyspace\r\ndb0:keys=1,expires=1,avg_ttl=100000\r\n"
    text = driver.say("INFO persistence memory").decode()
    assert text.index("# Memory") < text.index("# Persistence")
    assert "aof_enabled:1\r\n" in text
    assert "aof_base_size:7\r\n" in text
    assert driver.say("INFO nothing") == b""
    assert b"# Commandstats" not in driver.say("INFO")
    assert b"# Commandstats" in driver.say("INFO everything")


def test_debug_is_disabled_by_default() -> None:
    assert Driver().error("DEBUG LOADAOF").startswith("ERR DEBUG command not allowed.")
    reloads: list[int] = []
    driver = Driver(debug_enabled=True, hooks=Hooks(reload_journal=lambda: reloads.append(1)))
    assert driver.say("DEBUG LOADAOF") == OK
    assert reloads == [1]
    assert driver.error("DEBUG SLEEP").startswith("ERR unknown subcommand")
    assert Driver(debug_enabled=True).error("DEBUG LOADAOF").startswith("ERR There is no journal")


def test_rewrite_is_requested_from_the_driver() -> None:
    asked: list[int] = []
    driver = Driver(hooks=Hooks(rewrite_journal=lambda: asked.append(1)))
    assert driver.say("BGREWRITEAOF") == Status(b"Background append only file rewriting started")
    assert asked == [1]
    assert Driver().error("BGREWRITEAOF").startswith("ERR There is no journal")


def test_settings_for_the_driver_reach_it() -> None:
    configured: list[tuple[str, str]] = []
    driver = Driver(hooks=Hooks(configure=lambda name, value: configured.append((name, value))))
    driver.say("CONFIG SET appendfsync always maxclients 5")
    assert configured == [("appendfsync", "always"), ("maxclients", "5")]
    driver.say("CONFIG SET appendfsync always maxclients 0")
    assert len(configured) == 2


def test_command_table_is_consistent() -> None:
    driver = Driver()
    get, missing, client = driver.say("COMMAND INFO get nosuch client")
    assert get[:6] == [b"get", 2, [b"readonly", b"fast"], 1, 1, 1]
    assert missing is None
    assert b"client|id" in [sub[0] for sub in client[9]]
    assert driver.say("COMMAND COUNT") == len(driver.say("COMMAND"))
    assert driver.say("COMMAND GETKEYS MSET a 1 b 2") == [b"a", b"b"]
    assert driver.say("COMMAND GETKEYS EVAL script 2 a b c") == [b"a", b"b"]
    assert b"CLIENT <subcommand>" in driver.say("CLIENT HELP")[0]
    assert driver.say("COMMAND DOCS get") == [
        b"get",
        [b"summary", b"As in Redis 7.0", b"group", b"string", b"arity", 2],
    ]


def test_every_command_is_documented_with_what_redis_cli_needs() -> None:
    docs = Driver().say("COMMAND DOCS")
    for name, facts in zip(docs[::2], docs[1::2], strict=True):
        known = dict(zip(facts[::2], facts[1::2], strict=True))
        assert known[b"summary"], name
        assert known[b"group"], name


def test_unknown_command_error_shows_bounded_arguments() -> None:
    driver = Driver()
    reply = driver.send((b"x" * 300, b"a" * 100, b"b" * 100, b"c"))
    assert isinstance(reply, ErrorReply)
    assert reply.text == (f"ERR unknown command '{'x' * 128}', with args beginning with: '{'a' * 100}' '{'b' * 25}' ")


def test_queued_commands_of_a_transaction_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(admission, "MAX_QUEUE_BYTES", 10_000)
    driver.say("MULTI")
    replies = [driver.say("SET k v") for _ in range(100)]
    assert [reply for reply in replies if isinstance(reply, ErrorReply)] != []
    assert driver.main.queue == []
    assert driver.error("EXEC").startswith("EXECABORT")
    assert driver.say("MULTI") == b"OK"
    assert driver.say("SET k v") == b"QUEUED"
    assert driver.say("EXEC") == [b"OK"]
