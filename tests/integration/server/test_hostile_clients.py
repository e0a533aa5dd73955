"""Malicious clients of ``millstream serve`` do not affect other clients."""

import pytest
from raw_client import Client

from millstream.testing.servers import ServeProcess
from millstream.wire.commands import NIL_ARRAY
from millstream.wire.resp import pack

PING = pack([b"PING"])


@pytest.fixture(scope="module")
def served():
    with ServeProcess() as process:
        yield process


@pytest.mark.parametrize(
    "raw",
    [
        b"*2147483647\r\n",
        PING + b"*2147483647\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 13\r\n\r\n*2147483647\r\n",
    ],
    ids=lambda raw: repr(raw[:28]),
)
def test_announced_request_lengths_allocate_no_memory(served, raw):
    """The peak memory of the process shows it: a list of so many arguments would take 16 GB."""
    before = peak_kb(served.pid)
    with Client(served.port) as villain:
        villain.send_raw(raw)
        villain.rest()
    with Client(served.port) as other:
        assert other.ask("PING") == b"PONG"
    assert peak_kb(served.pid) - before < 64 * 1024


def peak_kb(pid):
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM:"))


def test_many_small_requests_before_a_malformed_one_are_cheap(served):
    """Every request before the malformed one is answered, and other clients are served meanwhile."""
    for odd, last in ((b"PING\r\n", 1), (b"*1\r\n:5\r\n", 0)):
        with Client(served.port) as villain, Client(served.port) as other:
            villain.send_raw(PING * 4600 + odd)
            assert other.ask("PING") == b"PONG"
            assert [villain.take() for _ in range(4600 + last)] == [b"PONG"] * (4600 + last)


def test_client_is_throttled_by_the_time_of_its_commands():
    """Commands of other clients are answered between the long commands of one client, not after all of them."""
    with ServeProcess() as process, Client(process.port) as villain, Client(process.port) as other:
        other.send_raw(b"".join(pack([b"SET", b"key:%d" % number, b"x"]) for number in range(50_000)))
        assert all(other.take() == b"OK" for _ in range(50_000))
        villain.send_raw(pack([b"KEYS", b"nothing[a-z]*like?this"]) * 100)
        steps = [calls(other, "keys")]
        while steps[-1] < 100:
            steps.append(calls(other, "keys"))
        assert len(set(steps)) > 5  # without the limit, first none would be answered, and then all
        assert [villain.take() for _ in range(100)] == [[]] * 100


def calls(client, command):
    for line in client.ask("INFO", "commandstats").decode().splitlines():
        if line.startswith(f"cmdstat_{command}:"):
            return int(line.split("calls=")[1].split(",")[0])
    return 0


def test_password_guessing_does_not_starve_other_clients():
    with ServeProcess(["--password", "secret"]) as process, Client(process.port) as other:
        assert other.ask("AUTH", "secret") == b"OK"
        with Client(process.port) as villain:
            villain.send_raw(pack([b"AUTH", b"guess"]) * 2500)
            steps = [0]
            while steps[-1] < 2500:
                steps.append(calls(other, "auth"))
            assert len(steps) > 5


def test_pipelined_blocking_commands_run_one_after_the_other(served):
    with Client(served.port) as villain, Client(served.port) as other:
        villain.send_raw(pack([b"BLPOP", b"nothing", b"0.001"]) * 3000)
        for _ in range(50):
            assert other.ask("PING") == b"PONG"
        assert [villain.take() for _ in range(3000)] == [NIL_ARRAY] * 3000


def test_input_of_a_blocked_client_is_bounded(served):
    """An argument of one byte needs far more memory than a byte: the server stops reading early enough."""
    before = peak_kb(served.pid)
    with Client(served.port) as villain, Client(served.port) as other:
        villain.send("BLPOP", "nothing", "0")
        villain.sock.settimeout(2)
        with pytest.raises(TimeoutError):
            villain.sock.sendall(pack([b"A"]) * (6 << 20))
        assert other.ask("PING") == b"PONG"
    assert peak_kb(served.pid) - before < 32 * 1024


def test_known_script_with_wrong_arguments_returns_an_error(tmp_path):
    """The log has no traceback for each call, and the connection stays open."""
    from millstream.broker.embedded import Embedded

    embedded = Embedded()
    scripts = sorted(embedded.engine.loaded_scripts)
    embedded.close()
    process = ServeProcess().start()
    with Client(process.port) as villain:
        for sha in scripts:
            for words in ([0], [1, "k"], [2, "k", "x"], [1, "k", "x", "y"], [3, "k", "k", "k", "-1", "", "9" * 30]):
                villain.ask("EVALSHA", sha, *words)
        assert villain.ask("PING") == b"PONG"
    code, _, errors = process.stop()
    assert (code, errors) == (0, "")
