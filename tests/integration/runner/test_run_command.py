"""``millstream run`` with real processes on a real Redis: killed, drained, orphaned, restarted."""

from __future__ import annotations

import asyncio
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis

from millstream import Message, Publisher, open_broker
from millstream.testing import RedisProcess, wait_until

HERE = Path(__file__).parent


class Running:
    """A ``millstream run`` in a directory of its own, and its output."""

    def __init__(
        self, url: str, directory: Path, *options: str, target: str = "runner_shop:router", **env: str
    ) -> None:
        shutil.copy(HERE / "runner_shop.py", directory)
        self.output = directory / "output.txt"
        command = [sys.executable, "-m", "millstream", "run", target, *options]
        with self.output.open("w") as out:
            environment = {**os.environ, "MILLSTREAM_URL": url, **env}
            self.process = subprocess.Popen(command, cwd=directory, stdout=out, stderr=out, env=environment)

    def text(self) -> str:
        return self.output.read_text()

    def workers(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children()
        except psutil.NoSuchProcess:
            return []

    def ready(self, count: int) -> bool:
        assert self.process.poll() is None, self.text()
        return self.text().count("is ready") >= count

    def end(self, number: signal.Signals = signal.SIGTERM, timeout: float = 60) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout)


@pytest.fixture
def run(redis_server: RedisProcess, tmp_path: Path) -> Iterator[Callable[..., Running]]:
    redis.Redis(port=redis_server.port).flushall()
    started: list[Running] = []

    def start(*options: str, **more: Any) -> Running:
        started.append(Running(redis_server.url, tmp_path, *options, **more))
        return started[-1]

    yield start
    for running in started:
        for worker in running.workers():
            worker.kill()
        if running.process.poll() is None:
            running.process.kill()
        running.process.wait(10)


async def publish(url: str, first: int, count: int) -> None:
    async with open_broker(url) as broker, Publisher(broker) as publisher:
        await asyncio.gather(*(publisher.publish("orders", Message(b"%d" % n)) for n in range(first, first + count)))


def billed(client: redis.Redis) -> list[tuple[int, int]]:
    """Each order that was billed, and by which process."""
    entries = client.xrange("billed")
    matches = [re.search(rb"(\d+) (\d+)$", fields.get(b"payload", b"")) for _, fields in entries]
    return [(int(match[1]), int(match[2])) for match in matches if match]


def test_four_processes_share_the_work_while_they_are_killed_and_sigterm_comes_under_load(
    run: Callable[..., Running], redis_server: RedisProcess
) -> None:
    """The ledger is balanced at the end: every published order is billed once, whichever workers died or drained."""
    client = redis.Redis(port=redis_server.port)
    running = run("--processes", "4")
    wait_until(lambda: running.ready(4), timeout_s=60)
    seed = random.randrange(10**6)
    dice = random.Random(seed)
    print(f"seed {seed}")
    for round_number in range(3):
        asyncio.run(publish(redis_server.url, round_number * 200, 200))
        ready = running.text().count("is ready")
        dice.choice(running.workers()).kill()
        wait_until(lambda ready=ready: running.ready(ready + 1), timeout_s=60)
    load = threading.Thread(target=lambda: asyncio.run(publish(redis_server.url, 600, 1_000)))
    load.start()
    wait_until(lambda: any(order >= 600 for order, _ in billed(client)), timeout_s=60)
    assert running.end() == 0, running.text()
    load.join()
    print(f"billed when all had ended: {len(billed(client))} of 1,600")
    text = running.text()
    assert text.count("killed by SIGKILL") == 3
    assert re.search(r"all workers have ended; \d+ messages? returned to the group", text)

    running = run("--processes", "4")
    wait_until(lambda: running.ready(4), timeout_s=60)  # there may be nothing left to do
    wait_until(lambda: len(billed(client)) >= 1_600, timeout_s=120)
    wait_until(lambda: client.xpending("orders", "billing")["pending"] == 0, timeout_s=60)
    assert running.end() == 0, running.text()
    orders = [order for order, _ in billed(client)]
    assert sorted(orders) == list(range(1_600)), f"seed {seed}: an output travels with its acknowledgement, once"
    assert len({process for _, process in billed(client)}) >= 4
    assert "all workers have ended; 0 messages returned to the group" in running.text()


def test_sigterm_drains_within_its_limit_and_reports_returned_messages(
    run: Callable[..., Running], redis_server: RedisProcess
) -> None:
    client = redis.Redis(port=redis_server.port)
    running = run("--drain", "1s", WORK_S="600")
    wait_until(lambda: running.ready(1), timeout_s=60)
    asyncio.run(publish(redis_server.url, 0, 5))
    wait_until(lambda: client.xpending("orders", "billing")["pending"] == 5, timeout_s=30)
    assert running.end() == 0, running.text()
    assert "5 messages returned to the group" in running.text()
    assert billed(client) == []


def test_second_signal_ends_without_waiting_for_handlers(
    run: Callable[..., Running], redis_server: RedisProcess
) -> None:
    client = redis.Redis(port=redis_server.port)
    running = run("--drain", "10m", WORK_S="600")
    wait_until(lambda: running.ready(1), timeout_s=60)
    asyncio.run(publish(redis_server.url, 0, 2))
    wait_until(lambda: client.xpending("orders", "billing")["pending"] == 2, timeout_s=30)
    (worker,) = running.workers()
    worker.suspend()  # the two signals must stay distinct however late they are delivered
    running.process.send_signal(signal.SIGINT)
    wait_until(lambda: "draining" in running.text(), timeout_s=10)
    running.process.send_signal(signal.SIGINT)
    wait_until(lambda: "second signal, ending" in running.text(), timeout_s=10)
    worker.resume()
    assert running.process.wait(60) == 0, running.text()


def test_sigterm_for_every_process_of_the_service_drains(
    run: Callable[..., Running], redis_server: RedisProcess, tmp_path: Path
) -> None:
    """As systemd sends it with ``KillMode=control-group``, its default: a worker receives a second one."""
    client = redis.Redis(port=redis_server.port)
    hold = tmp_path / "hold.txt"
    hold.touch()
    running = run("--drain", "10m", target="runner_shop:slow_to_claim")
    wait_until(lambda: running.ready(1), timeout_s=60)
    asyncio.run(publish(redis_server.url, 0, 2))
    wait_until(lambda: client.xpending("orders", "billing")["pending"] == 2, timeout_s=30)
    running.workers()[0].terminate()
    wait_until(lambda: "SIGTERM: closing" in running.text(), timeout_s=30)
    running.process.terminate()
    wait_until(lambda: "SIGTERM again" in running.text(), timeout_s=30)
    hold.unlink()
    assert running.process.wait(60) == 0, running.text()
    assert "all workers have ended; 0 messages returned to the group" in running.text()
    assert len(billed(client)) == 2


def test_forked_child_of_a_handler_is_terminated_alone(run: Callable[..., Running], redis_server: RedisProcess) -> None:
    client = redis.Redis(port=redis_server.port)
    running = run(target="runner_shop:terminating")
    wait_until(lambda: running.ready(1), timeout_s=60)
    asyncio.run(publish(redis_server.url, 0, 3))
    wait_until(lambda: client.xlen("billed") == 3, timeout_s=60)
    payloads = {fields[b"payload"] for _, fields in client.xrange("billed")}
    (worker,) = running.workers()
    assert payloads == {f"{-signal.SIGTERM.value} {worker.pid}".encode()}
    assert "SIGTERM: closing" not in running.text()
    assert running.end() == 0, running.text()


def test_workers_end_when_their_supervisor_was_killed(run: Callable[..., Running]) -> None:
    running = run("--processes", "2")
    wait_until(lambda: running.ready(2), timeout_s=60)
    workers = running.workers()
    running.process.kill()
    wait_until(lambda: not any(worker.is_running() and worker.status() != "zombie" for worker in workers), timeout_s=30)


def has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_worker_that_is_opening_ends_when_its_supervisor_was_killed(run: Callable[..., Running]) -> None:
    running = run(target="runner_shop:blocked_while_opening")
    wait_until(lambda: len(running.workers()) == 1, timeout_s=60)
    (worker,) = running.workers()
    wait_until(lambda: worker.num_threads() > 1, timeout_s=60)  # the import has ended
    running.process.kill()
    try:
        wait_until(lambda: has_ended(worker), timeout_s=20)
    finally:
        worker.kill()


def test_worker_with_a_blocked_event_loop_ends_when_its_supervisor_was_killed(
    run: Callable[..., Running], redis_server: RedisProcess
) -> None:
    client = redis.Redis(port=redis_server.port)
    running = run("--drain", "100ms", target="runner_shop:blocking")
    wait_until(lambda: running.ready(1), timeout_s=60)
    asyncio.run(publish(redis_server.url, 0, 1))
    wait_until(lambda: client.xpending("orders", "billing")["pending"] == 1, timeout_s=30)
    (worker,) = running.workers()
    running.process.kill()
    try:
        wait_until(lambda: has_ended(worker), timeout_s=30)
    finally:
        worker.kill()


def test_reload_replaces_a_worker_with_a_blocked_event_loop(
    run: Callable[..., Running], redis_server: RedisProcess, tmp_path: Path
) -> None:
    client = redis.Redis(port=redis_server.port)
    running = run("--reload", "--drain", "100ms", target="runner_shop:blocking")
    wait_until(lambda: running.ready(1), timeout_s=60)
    asyncio.run(publish(redis_server.url, 0, 1))
    wait_until(lambda: client.xpending("orders", "billing")["pending"] == 1, timeout_s=30)
    (before,) = running.workers()
    os.utime(tmp_path / "runner_shop.py", ns=(time.time_ns(), time.time_ns() + 10**9))
    wait_until(lambda: [worker.pid for worker in running.workers()] not in ([], [before.pid]), timeout_s=60)


def test_sighup_drains(run: Callable[..., Running]) -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the test itself may run under nohup
    try:
        running = run()
    finally:
        signal.signal(signal.SIGHUP, previous)
    wait_until(lambda: running.ready(1), timeout_s=60)
    assert running.end(signal.SIGHUP) == 0, running.text()
    assert "SIGHUP: draining" in running.text()


def test_ignored_sighup_stays_ignored(run: Callable[..., Running]) -> None:
    """As under nohup."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        running = run()
    finally:
        signal.signal(signal.SIGHUP, previous)
    wait_until(lambda: running.ready(1), timeout_s=60)
    running.process.send_signal(signal.SIGHUP)
    assert running.end() == 0, running.text()
    assert "SIGHUP" not in running.text()


def test_second_signal_does_not_wait_for_a_broker_that_does_not_answer(
    run: Callable[..., Running], redis_server: RedisProcess, tmp_path: Path
) -> None:
    client = redis.Redis(port=redis_server.port)
    (tmp_path / "hold.txt").touch()
    running = run("--drain", "1m", target="runner_shop:slow_to_claim")
    wait_until(lambda: running.ready(1), timeout_s=60)
    asyncio.run(publish(redis_server.url, 0, 1))
    wait_until(lambda: client.xpending("orders", "billing")["pending"] == 1, timeout_s=30)
    (worker,) = running.workers()
    redis_process = psutil.Process(redis_server.pid)
    redis_process.suspend()
    try:
        running.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "draining" in running.text(), timeout_s=10)
        worker.kill()
        wait_until(lambda: has_ended(worker), timeout_s=10)
        running.end()
    finally:
        redis_process.resume()
    assert "could not be handed over in time" in running.text(), "the second signal ends it, not its time limit"


def test_reload_restarts_workers_when_a_file_changes(run: Callable[..., Running], tmp_path: Path) -> None:
    running = run("--reload")
    wait_until(lambda: running.ready(1), timeout_s=60)
    [before] = running.workers()
    source = tmp_path / "runner_shop.py"
    os.utime(source, ns=(time.time_ns(), time.time_ns() + 10**9))
    wait_until(lambda: running.ready(2), timeout_s=60)
    [after] = running.workers()
    assert after.pid != before.pid
    assert running.end() == 0


@pytest.mark.parametrize("target", ["runner_shop:make", "runner_shop:opened"])
def test_target_may_be_a_function(run: Callable[..., Running], redis_server: RedisProcess, target: str) -> None:
    client = redis.Redis(port=redis_server.port)
    running = run(target=target)
    wait_until(lambda: running.ready(1), timeout_s=60)
    asyncio.run(publish(redis_server.url, 0, 3))
    wait_until(lambda: len(billed(client)) == 3, timeout_s=30)
    assert running.end() == 0


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("runner_shop:ruter", "did you mean 'router'?"),
        ("nowhere:router", "there is no module 'nowhere' here"),
        ("runner_shop", "package.module:name"),
        ("runner_shop:not_runnable", "of the type int"),
        ("runner_shop:wrong_option", "max_in_flight"),
        ("broken_syntax:router", "broken_syntax.py:2"),
        ("broken_import:router", "No module named 'no_such_library'"),
    ],
)
def test_target_that_cannot_run_ends_with_one_sentence(
    run: Callable[..., Running], tmp_path: Path, target: str, why: str
) -> None:
    (tmp_path / "broken_syntax.py").write_text("from millstream import Router\nrouter = Router(\n")
    (tmp_path / "broken_import.py").write_text("import no_such_library\n")
    running = run("--processes", "2", target=target)
    assert running.process.wait(60) == 2, running.text()
    assert why in running.text()
    assert "Traceback" not in running.text()
    assert running.text().count("ERROR") == 1, "the other process has nothing to add"


def test_router_that_fails_at_its_start_is_logged_with_one_traceback(
    run: Callable[..., Running], tmp_path: Path
) -> None:
    (tmp_path / "needs_settings.py").write_text("import os\n\nsecret = os.environ['SHOP_SETTINGS']\n")
    running = run(target="needs_settings:router")
    wait_until(lambda: running.text().count("restarting in") >= 3, timeout_s=60)
    running.end()
    text = running.text()
    assert text.count("Traceback") == 1, text
    assert re.search(r"died: KeyError: 'SHOP_SETTINGS' \(\S*needs_settings\.py:3\); restarting in [\d.]+ s", text)
    frames = re.findall(r'^  File "([^"]+)"', text, re.M)
    assert frames[0].endswith("needs_settings.py"), "none of ours before it"
    assert not [frame for frame in frames if "millstream" in frame]


def test_reload_waits_until_a_broken_file_is_repaired(run: Callable[..., Running], tmp_path: Path) -> None:
    source = tmp_path / "being_written.py"
    source.write_text("from runner_shop import ruter\n")
    running = run("--reload", target="being_written:router")
    wait_until(lambda: "cannot import name 'ruter'" in running.text(), timeout_s=60)
    source.write_text("from runner_shop import router as router\n")
    wait_until(lambda: running.ready(1), timeout_s=60)
    assert running.end() == 0
    assert "Traceback" not in running.text()


def test_check_lists_handlers_and_reaches_the_broker(redis_server: RedisProcess, tmp_path: Path) -> None:
    shutil.copy(HERE / "runner_shop.py", tmp_path)
    command = [sys.executable, "-m", "millstream", "run", "runner_shop:router", "--check", "--url"]
    fine = subprocess.run([*command, redis_server.url], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert re.search(r"bill\s+orders\s+billing", fine.stdout)
    away = subprocess.run([*command, "redis://127.0.0.1:1"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert away.returncode == 3
    command[4] = "runner_shop:ruter"
    wrong = subprocess.run([*command, redis_server.url], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert wrong.returncode == 2, "as without --check"
    assert "did you mean 'router'" in wrong.stderr


def test_check_refuses_contradicting_retention_policies(tmp_path: Path) -> None:
    (tmp_path / "kept.py").write_text(
        "from millstream import Message, Router\n"
        "router = Router(group_start='0')\n"
        "async def ignore(message: Message) -> None: ...\n"
        "router.add(ignore, 'orders', group='a', keep='7d')\n"
        "router.add(ignore, 'orders', group='b', keep='1d')\n"
    )
    command = [sys.executable, "-m", "millstream", "run", "kept:router", "--check", "--url", "local://kept"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode != 0
    assert "different retention policies for 'orders'" in " ".join(ended.stderr.split())


def test_control_characters_of_an_error_are_escaped_by_check(redis_server: RedisProcess, tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("raise ValueError('boom \\x1b[2J\\x07')\n")
    command = [sys.executable, "-m", "millstream", "run", "evil:router", "--check", "--url", redis_server.url]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "evil.py" in ended.stderr
    assert ended.stderr.replace("\n", "").isprintable()


@pytest.fixture
def forked_children(tmp_path: Path) -> Iterator[None]:
    yield
    for pid in (tmp_path / "children.txt").read_text().split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            pass


@pytest.mark.usefixtures("forked_children")
def test_killed_worker_is_restarted_while_its_forked_child_lives(run: Callable[..., Running]) -> None:
    running = run(target="runner_shop:with_a_child")
    wait_until(lambda: running.ready(1), timeout_s=60)
    running.workers()[0].kill()
    wait_until(lambda: running.ready(2), timeout_s=60)
    assert "killed by SIGKILL" in running.text()
    assert running.end() == 0, running.text()


@pytest.mark.usefixtures("forked_children")
def test_second_signal_ends_the_supervisor_of_a_worker_with_a_forked_child(run: Callable[..., Running]) -> None:
    running = run("--drain", "10m", target="runner_shop:with_a_child", WORK_S="600")
    wait_until(lambda: running.ready(1), timeout_s=60)
    running.workers()[0].suspend()
    running.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "draining" in running.text(), timeout_s=10)
    assert running.end() == 1, running.text()


def test_report_longer_than_the_limit_does_not_end_the_supervisor(run: Callable[..., Running]) -> None:
    running = run(target="runner_shop:with_a_long_line")
    wait_until(lambda: running.text().count("died") >= 2, timeout_s=60)
    assert running.process.poll() is None
    assert running.end() == 0


def test_worker_that_exits_with_the_code_for_refused_targets_is_restarted(run: Callable[..., Running]) -> None:
    running = run(target="runner_shop:with_an_exit_code")
    wait_until(lambda: running.text().count("died: exit code 78") >= 2, timeout_s=60)
    assert running.process.poll() is None
    assert running.end() == 0, running.text()


def test_real_time_signal_is_named_by_its_number(run: Callable[..., Running]) -> None:
    running = run()
    wait_until(lambda: running.ready(1), timeout_s=60)
    running.workers()[0].send_signal(signal.SIGRTMIN + 1)
    wait_until(lambda: running.ready(2), timeout_s=60)
    assert f"killed by signal {signal.SIGRTMIN + 1}" in running.text()
    assert running.end() == 0


def holders(client: redis.Redis) -> dict[int, int]:
    """Process id of each consumer to the number of its pending entries."""
    consumers = client.xinfo_consumers("orders", "billing")
    return {int(consumer["name"].decode().split("-")[-2]): consumer["pending"] for consumer in consumers}


def test_messages_of_a_killed_worker_are_handed_over_at_once(
    run: Callable[..., Running], redis_server: RedisProcess, tmp_path: Path
) -> None:
    """Without the hand-over they would wait for an hour, which is the router's claim_min_idle_ms."""
    client = redis.Redis(port=redis_server.port)
    hold = tmp_path / "hold.txt"
    hold.touch()
    running = run("--processes", "2", target="runner_shop:slow_to_claim")
    wait_until(lambda: running.ready(2), timeout_s=60)
    for first in range(0, 1_000, 10):  # until both workers hold messages
        asyncio.run(publish(redis_server.url, first, 10))
        published = first + 10
        wait_until(lambda count=published: client.xpending("orders", "billing")["pending"] == count, timeout_s=30)
        if all(holders(client).values()):
            break
    before = holders(client)
    assert len(before) == 2
    assert all(before.values())
    killed = running.workers()[0]
    killed.kill()
    wait_until(lambda: f"handed over {before[killed.pid]} pending messages" in running.text(), timeout_s=60)
    hold.unlink()
    wait_until(lambda: len(billed(client)) == published, timeout_s=60)
    assert sorted(order for order, _ in billed(client)) == list(range(published)), "each is handled once"
    assert killed.pid not in {process for _, process in billed(client)}
    assert running.end() == 0, running.text()


def test_messages_under_a_chosen_consumer_name_are_not_handed_over(
    run: Callable[..., Running], redis_server: RedisProcess, tmp_path: Path
) -> None:
    """A living process may read under the same name. The new worker finds them under its own name."""
    client = redis.Redis(port=redis_server.port)
    hold = tmp_path / "hold.txt"
    hold.touch()
    running = run(target="runner_shop:named")
    wait_until(lambda: running.ready(1), timeout_s=60)
    asyncio.run(publish(redis_server.url, 0, 3))
    wait_until(lambda: client.xpending("orders", "billing")["pending"] == 3, timeout_s=30)
    running.workers()[0].kill()
    wait_until(lambda: running.ready(2), timeout_s=60)
    hold.unlink()
    wait_until(lambda: len(billed(client)) == 3, timeout_s=60)
    assert running.end() == 0, running.text()
    assert "handed over" not in running.text()


def test_two_processes_with_one_chosen_consumer_name_are_refused(run: Callable[..., Running]) -> None:
    running = run("--processes", "2", target="runner_shop:named")
    assert running.process.wait(60) == 2, running.text()
    assert "as consumer 'chosen'" in running.text()


def test_processes_may_choose_different_consumer_names(run: Callable[..., Running]) -> None:
    running = run("--processes", "2", target="runner_shop:named_by_process")
    wait_until(lambda: running.ready(2), timeout_s=60)
    assert running.end() == 0, running.text()


def test_failed_hand_over_is_logged_and_the_worker_is_restarted(
    run: Callable[..., Running], redis_server: RedisProcess, tmp_path: Path
) -> None:
    client = redis.Redis(port=redis_server.port)
    (tmp_path / "hold.txt").touch()
    running = run(target="runner_shop:slow_to_claim")
    wait_until(lambda: running.ready(1), timeout_s=60)
    asyncio.run(publish(redis_server.url, 0, 3))
    wait_until(lambda: client.xpending("orders", "billing")["pending"] == 3, timeout_s=30)
    client.acl_setuser("default", enabled=True, commands=["-xclaim"])
    try:
        running.workers()[0].kill()
        wait_until(lambda: "could not be handed over" in running.text(), timeout_s=60)
        wait_until(lambda: running.ready(2), timeout_s=60)
    finally:
        client.acl_setuser("default", enabled=True, commands=["+xclaim"])
    (tmp_path / "hold.txt").unlink()
    assert running.end() == 0, running.text()
