"""Order, waits, passwords and threads, across connections."""

import os
import random
import threading

import pytest

from millstream.broker import open_blocking_broker
from millstream.broker.embedded import Embedded
from millstream.engine.journal.frames import pack
from millstream.engine.session import BLOCKED
from millstream.errors import BrokerUnavailable, InvalidArgument
from millstream.server import Server, ServerLimits
from millstream.server.connections import CannotListen
from millstream.testing.waiting import wait_until
from millstream.wire.commands import NIL_ARRAY, ErrorReply
from support.simulated_disk import SimulatedDisk


@pytest.fixture
def one_core():
    thread, before = threading.get_native_id(), os.sched_getaffinity(0)
    yield lambda core: os.sched_setaffinity(thread, {core})
    os.sched_setaffinity(thread, before)


def test_connections_are_served_in_order_of_arrival(embedded, connect, one_core):
    clients = [connect() for _ in range(8)]
    for client in clients:
        client.ask("PING")  # the server knows it: what came before that is found in the order of the connections
    # On one core, because packets that are sent on two may overtake each other on their way.
    one_core(min(os.sched_getaffinity(0)))
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    expected = []
    for turn in range(300):
        dice.shuffle(clients)
        with embedded.turn():  # holds the server up, so that all of them are there when it looks
            for number, client in enumerate(clients):
                client.send("RPUSH", "order", turn * 8 + number)
                expected.append(b"%d" % (turn * 8 + number))
        for client in clients:
            client.take()
    assert clients[0].ask("LRANGE", "order", 0, -1) == expected


def wait_for_blocked(client, count):
    wait_until(lambda: b"\r\nblocked_clients:%d\r\n" % count in client.ask("INFO", "clients"), what="blocked clients")


def test_blocked_readers_are_woken_in_order_of_arrival(connect):
    writer = connect()
    writer.ask("XGROUP", "CREATE", "s", "g", "$", "MKSTREAM")
    readers = [connect() for _ in range(3)]
    for number, reader in enumerate(readers):
        # What a client sends behind a command that waits is answered after it.
        reader.send_raw(
            pack(
                [b"XREADGROUP", b"GROUP", b"g", b"c%d" % number, b"COUNT", b"1", b"BLOCK", b"0", b"STREAMS", b"s", b">"]
            )
            + pack([b"ECHO", b"after"])
        )
        wait_for_blocked(writer, number + 1)
    for number in range(3):
        writer.ask("XADD", "s", f"{number + 1}-0", "f", "v")
    for number, reader in enumerate(readers):
        assert reader.take() == [[b"s", [[b"%d-0" % (number + 1), [b"f", b"v"]]]]]
        assert reader.take() == b"after"


def test_wait_ends_at_its_timeout_or_at_a_disconnect(connect):
    client, gone = connect(), connect()
    assert client.ask("XREAD", "BLOCK", 20, "STREAMS", "s", "$") is NIL_ARRAY
    gone.send("XREAD", "BLOCK", 0, "STREAMS", "s", "$")
    wait_for_blocked(client, 1)
    gone.close()
    wait_for_blocked(client, 0)


def test_password_is_required_and_limits_before_it_are_small(make_server, connect):
    guarded = Embedded(password=b"secret")
    port = make_server(guarded).port
    client = connect(port)
    assert client.ask("GET", "k") == ErrorReply("NOAUTH Authentication required.")
    assert isinstance(client.ask("AUTH", "wrong"), ErrorReply)
    client.send_raw(pack([b"ECHO", b"x" * 16385]))
    assert client.rest() == b"-ERR Protocol error: unauthenticated bulk length\r\n"
    client = connect(port)
    client.send_raw(b"*11\r\n")
    assert client.rest() == b"-ERR Protocol error: unauthenticated multibulk length\r\n"
    # In one go: what comes behind AUTH is not bound by the small limits.
    client = connect(port)
    client.send_raw(pack([b"AUTH", b"secret"]) + pack([b"ECHO", b"x" * 100_000]) + pack([b"PING"]))
    assert [client.take(), client.take(), client.take()] == [b"OK", b"x" * 100_000, b"PONG"]
    assert client.ask("RESET") == b"RESET"
    client.send_raw(b"*11\r\n")
    assert client.rest() == b"-ERR Protocol error: unauthenticated multibulk length\r\n"
    guarded.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::"])
def test_serving_off_loopback_requires_a_password(embedded, host):
    with pytest.raises(CannotListen, match="without a password"):
        Server(embedded, host, 0)


def test_serving_off_loopback_with_a_password_is_allowed(connect):
    guarded = Embedded(password=b"secret")
    with Server(guarded, "0.0.0.0", 0) as server:
        assert connect(server.port).ask("AUTH", "secret") == b"OK"
    guarded.close()


def test_port_in_use_is_named_in_the_error(embedded, server):
    with pytest.raises(CannotListen, match=f"127.0.0.1:{server.port}"):
        Server(embedded, "127.0.0.1", server.port)


def test_unix_socket(embedded, tmp_path, make_server):
    import redis

    path = tmp_path / "socket"
    server = make_server(unix_socket=path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert redis.Redis(unix_socket_path=str(path)).set("k", "v")
    server.stop()
    assert not path.exists()


def test_embedding_process_and_clients_share_data(embedded, connect):
    client = connect()
    own = []
    reader = embedded.session(own.append)
    assert embedded.execute(reader, (b"XREAD", b"BLOCK", b"0", b"STREAMS", b"s", b"$")) is BLOCKED
    assert client.ask("XADD", "s", "1-1", "f", "v") == b"1-1"
    wait_until(lambda: own == [[[b"s", [[b"1-1", [b"f", b"v"]]]]]])
    client.send("XREAD", "BLOCK", 0, "STREAMS", "s", "1-1")
    wait_for_blocked(connect(), 1)
    embedded.execute(embedded.session(), (b"XADD", b"s", b"2-1", b"f", b"v"))
    assert client.take() == [[b"s", [[b"2-1", [b"f", b"v"]]]]]


def test_broker_opened_by_url_can_be_served(connect):
    with open_blocking_broker("local://shared") as broker, Server.over(broker, port=0) as server:
        entry = broker.xadd("s", {"f": "v"})
        assert connect(server.port).ask("XRANGE", "s", "-", "+") == [[bytes(entry), [b"f", b"v"]]]
    with open_blocking_broker("redis://127.0.0.1:1") as elsewhere, pytest.raises(InvalidArgument, match="local://"):
        Server.over(elsewhere)


def test_closing_the_broker_ends_its_server(connect):
    broker = open_blocking_broker("local://brief")
    server = Server.over(broker, port=0).start()
    client = connect(server.port)
    assert client.ask("PING") == b"PONG"
    broker.close()
    client.send("PING")
    assert client.rest() == b""
    server.stop()


def test_many_threads_and_connections_lose_no_update(embedded, server, connect):
    clients = [connect() for _ in range(4)]

    def through_the_server(client):
        for _ in range(500):
            client.ask("INCR", "n")

    def directly():
        session = embedded.session()
        for _ in range(500):
            embedded.execute(session, (b"INCR", b"n"))

    threads = [threading.Thread(target=through_the_server, args=(client,)) for client in clients]
    threads += [threading.Thread(target=directly) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clients[0].ask("GET", "n") == b"4000"


def test_pushed_messages_keep_their_order_among_replies_in_resp3(connect, redis_server):
    from raw_client import Client

    def talk(client):
        client.ask("HELLO", 3)
        client.ask("SUBSCRIBE", "c")
        client.send_raw(pack([b"PUBLISH", b"c", b"x"]) + pack([b"ECHO", b"after"]))
        return [client.take(), client.take(), client.take()]

    theirs = Client(redis_server.port)
    assert talk(connect()) == talk(theirs)
    theirs.close()


def test_write_that_the_journal_rejects_is_not_confirmed(tmp_path, make_server, connect):
    disk = SimulatedDisk()
    durable = Embedded(directory=tmp_path, files=disk)
    port = make_server(durable).port
    writer, reader, waiter = connect(port), connect(port), connect(port)
    assert writer.ask("SET", "k", "v") == b"OK"
    waiter.send("XREAD", "BLOCK", 0, "STREAMS", "s", "$")
    wait_for_blocked(reader, 1)
    disk.free_bytes = 0
    writer.send_raw(pack([b"GET", b"k"]) + pack([b"XADD", b"s", b"1-1", b"f", b"v"]) + pack([b"GET", b"k"]))
    replies = [writer.take() for _ in range(3)]
    assert replies[::2] == [b"v", b"v"]
    assert replies[1].text.startswith("UNWRITTEN Errors writing to the AOF file: No space left on device")
    assert reader.ask("SET", "k", "w").text.startswith("MISCONF")
    assert reader.ask("GET", "k") == b"v"
    disk.free_bytes = None
    assert waiter.take() == [[b"s", [[b"1-1", [b"f", b"v"]]]]]
    wait_until(lambda: writer.ask("SET", "k", "w") == b"OK", what="the journal to be repaired")
    durable.close()


def test_entry_rejected_by_a_full_disk_is_not_added_later(tmp_path, make_server):
    """The change is in memory, and is written when there is space. An automatic retry would add it twice."""
    disk = SimulatedDisk()
    durable = Embedded(directory=tmp_path, files=disk)
    with open_blocking_broker(f"redis://127.0.0.1:{make_server(durable).port}", deadline_ms=600_000) as broker:
        broker.xadd("s", {"n": "1"})
        disk.free_bytes = 0
        with pytest.raises(BrokerUnavailable, match="UNWRITTEN") as caught:
            broker.xadd("s", {"n": "2"})
        assert caught.value.may_have_been_applied
        disk.free_bytes = None
        broker.xadd("s", {"n": "3"})
        assert [entry.fields[b"n"] for entry in broker.xrange("s")] == [b"1", b"2", b"3"]
    durable.close()


def test_stop_replies_to_received_requests_and_ends_waits(embedded, connect):
    server = Server(embedded, port=0, limits=ServerLimits(drain_ms=30_000)).start()
    worker, waiter = connect(server.port), connect(server.port)
    waiter.send("XREAD", "BLOCK", 0, "STREAMS", "s", "$")
    wait_for_blocked(worker, 1)
    worker.send_raw(pack([b"INCR", b"n"]) * 5000)
    server.stop()
    assert worker.rest().count(b":") == 5000
    assert waiter.rest() == b"*-1\r\n"
    assert embedded.execute(embedded.session(), (b"GET", b"n")) == b"5000"


def test_settings_are_applied_while_the_server_runs(connect):
    client = connect()
    assert client.ask("CONFIG", "SET", "maxclients", 2) == b"OK"
    other = connect()
    assert other.ask("PING") == b"PONG"
    assert connect().rest() == b"-ERR max number of clients reached\r\n"
    assert client.ask("CONFIG", "SET", "maxclients", 100, "proto-max-bulk-len", 1 << 20) == b"OK"
    connect().ask("PING")
    other.send_raw(b"*2\r\n$4\r\nECHO\r\n$1048577\r\n")
    assert other.rest() == b"-ERR Protocol error: invalid bulk length\r\n"
    assert client.ask("CONFIG", "SET", "requirepass", "secret") == b"OK"
    assert connect().ask("PING") == ErrorReply("NOAUTH Authentication required.")
    assert client.ask("PING") == b"PONG"


def test_timeout_closes_idle_clients_but_not_blocked_ones(connect):
    waiter, listener, idle, client = connect(), connect(), connect(), connect()
    assert idle.ask("PING") == b"PONG"
    waiter.send("XREAD", "BLOCK", 0, "STREAMS", "s", "$")
    listener.ask("SUBSCRIBE", "c")
    wait_for_blocked(client, 1)
    client.ask("CONFIG", "SET", "timeout", 1)
    assert idle.rest() == b""
    # A client for each: between two questions a busy machine may take so long that it would be idle too.
    connect().ask("XADD", "s", "1-1", "f", "v")
    assert waiter.take() == [[b"s", [[b"1-1", [b"f", b"v"]]]]]
    assert connect().ask("PUBLISH", "c", "x") == 1


def test_config_reports_port_and_journal_directory(tmp_path, make_server, connect):
    durable = Embedded(directory=tmp_path, appendfsync="always")
    server = make_server(durable)
    client = connect(server.port)
    assert client.ask("CONFIG", "GET", "port") == [b"port", b"%d" % server.port]
    assert client.ask("CONFIG", "GET", "appendfsync", "appendonly") == [
        b"appendfsync",
        b"always",
        b"appendonly",
        b"yes",
    ]
    assert client.ask("CONFIG", "GET", "dir") == [b"dir", str(tmp_path).encode()]
    assert client.ask("CONFIG", "SET", "appendfsync", "no") == b"OK"
    assert durable.persistence.journal.policy == "no"
    durable.close()


def test_command_times_are_reported(connect):
    client = connect()
    client.ask("NOSUCH")
    for n in range(200):
        client.ask("XADD", "s", "*", "n", str(n))
    times = _times(client)
    assert times["xadd"] > 0
    client.ask("CONFIG", "RESETSTAT")
    assert "xadd" not in _times(client)


def _times(client) -> dict[str, int]:
    lines = client.ask("INFO", "commandstats").decode().splitlines()[1:]
    named = (line.removeprefix("cmdstat_").split(":") for line in lines if line)
    return {name: int(dict(pair.split("=") for pair in facts.split(","))["usec"]) for name, facts in named}
