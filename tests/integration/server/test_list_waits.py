"""BLPOP and BRPOP, compared with a real Redis."""

import pytest
from raw_client import Client

from millstream.testing.waiting import wait_until


def wait_for_blocked(client, count):
    wait_until(lambda: b"\r\nblocked_clients:%d\r\n" % count in client.ask("INFO", "clients"), what="blocked clients")


@pytest.fixture(params=["ours", "redis"])
def clients(request):
    server = request.getfixturevalue("server" if request.param == "ours" else "redis_server")
    made = []

    def connect():
        made.append(Client(server.port))
        return made[-1]

    yield connect
    for client in made:
        client.close()


def test_existing_elements_are_popped_at_once(clients):
    client = clients()
    client.ask("RPUSH", "b", 1, 2, 3)
    assert client.ask("BLPOP", "a", "b", 0) == [b"b", b"1"]
    assert client.ask("BRPOP", "b", "a", "0.5") == [b"b", b"3"]
    assert client.ask("BLPOP", "b", 1) == [b"b", b"2"]
    assert client.ask("EXISTS", "b") == 0


def test_blocked_clients_are_served_once_and_in_order(clients):
    writer = clients()
    readers = [clients() for _ in range(3)]
    for number, reader in enumerate(readers):
        reader.send("BLPOP", "q", "other", 0)
        wait_for_blocked(writer, number + 1)
    assert writer.ask("RPUSH", "q", "x", "y") == 2
    assert [reader.take() for reader in readers[:2]] == [[b"q", b"x"], [b"q", b"y"]]
    wait_for_blocked(writer, 1)
    assert writer.ask("EXISTS", "q") == 0
    writer.ask("LPUSH", "other", "z")
    assert readers[2].take() == [b"other", b"z"]


def test_mismatched_arguments_return_errors(clients):
    client = clients()
    client.ask("SET", "s", "x")
    errors = [
        client.ask("BLPOP", "s", 0),
        client.ask("BLPOP", "q", "x"),
        client.ask("BLPOP", "q", "-1"),
        client.ask("BLPOP", "q"),
    ]
    assert [error.text for error in errors] == [
        "WRONGTYPE Operation against a key holding the wrong kind of value",
        "ERR timeout is not a float or out of range",
        "ERR timeout is negative",
        "ERR wrong number of arguments for 'blpop' command",
    ]
    assert not client.ask("BLPOP", "q", "0.01")
    client.ask("MULTI")
    client.ask("BLPOP", "q", 0)
    assert [bool(item) for item in client.ask("EXEC")] == [False]
