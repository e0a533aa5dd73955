"""The lease of a run on a real Redis: one holder, take-over after expiry, fenced writes, lost and absent servers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import redis

from millstream import BlockingBroker, open_blocking_broker
from millstream.broker import Fence
from millstream.broker.scripts.append_once import Digest
from millstream.errors import BrokerUnavailable, StaleOwner
from millstream.pipelines import run_lease
from millstream.pipelines.errors import CheckpointLocked, LeaseLost, LeaseUnverified, StopRequested
from millstream.pipelines.plan import PipelinePlan, make_plan
from millstream.pipelines.run_lease import RunLease, current_holder
from millstream.pipelines.runner import Runner
from millstream.pipelines.spec.pipeline import Pipeline
from millstream.spark.bulk import BulkOnce, UniformRows
from millstream.storage import StorageUnavailable
from millstream.testing import RedisProcess, free_port, wait_until
from millstream.testing.topologies import ClusterSetup


def plan(url: str, checkpoint: Path, *, name: str = "orders", tenant: str = "default", **spec: Any) -> PipelinePlan:
    whole = {
        "source": {"type": "generator", "config": {"rows": 10}},
        "sinks": [{"type": "redis", "config": {"id": "main", "uri": url, "stream": "out"}}],
        "checkpoint": {"path": str(checkpoint)},
        **spec,
    }
    head = {"apiVersion": "millstream/v1", "kind": "Pipeline", "metadata": {"name": name, "tenant": tenant}}
    return make_plan(Pipeline.model_validate({**head, "spec": whole}))


class OtherHost(RunLease):
    """A lease on a host that shares the checkpoint, but neither the lock nor the process table of this machine."""

    def _lock_here(self) -> CheckpointLocked | None:
        return None


class InStore(RunLease):
    """A lease whose checkpoint is in a store: no lock excludes another process."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.checkpoint.storage.is_local = False


@pytest.fixture
def leases() -> Iterator[Any]:
    made: list[RunLease] = []

    def make(kind: type[RunLease], *args: Any, **settings: Any) -> RunLease:
        made.append(kind(*args, **settings))
        return made[-1]

    yield make
    for lease in made:
        lease.release()


def pause(lease: RunLease) -> None:
    """Stop the renewals, as a paused process does."""
    lease._stop.set()
    assert lease._thread is not None
    lease._thread.join()


def take_over(lease: RunLease) -> None:
    def acquired() -> bool:
        try:
            lease.acquire()
        except CheckpointLocked:
            return False
        return True

    wait_until(acquired, what="the lease of the paused process expires")


@pytest.mark.parametrize("kind", [RunLease, OtherHost])
def test_second_run_is_refused_until_the_first_releases(
    redis_server: RedisProcess, tmp_path: Path, leases: Any, kind: type[RunLease]
) -> None:
    made = plan(redis_server.url, tmp_path / "c")
    first, second = leases(RunLease, made), leases(kind, made)
    first.acquire()
    for attempt in (second.peek, second.acquire):
        with pytest.raises(CheckpointLocked) as refused:
            attempt()
        assert (refused.value.host, refused.value.process) == (first.holder.host, os.getpid())
        assert refused.value.since is not None
    holder = current_holder(made, first.checkpoint)
    assert holder is not None
    assert holder.nonce == first.holder.nonce
    first.release()
    assert current_holder(made, first.checkpoint) is None
    second.acquire()
    assert second.check() is None


@pytest.mark.parametrize("kind", [RunLease, OtherHost])
def test_expired_lease_is_taken_over_and_the_paused_process_is_fenced(
    redis_server: RedisProcess, tmp_path: Path, leases: Any, kind: type[RunLease]
) -> None:
    made = plan(redis_server.url, tmp_path / "c")
    first, second = leases(RunLease, made, lease_s=0.5), leases(kind, made)
    first.acquire()
    before = first.fence_for(first.address)
    pause(first)
    take_over(second)
    with pytest.raises(LeaseLost) as lost:
        first.verify(threading.Event())
    assert lost.value.process == str(os.getpid())
    assert second.check() is None
    after = second.fence_for(second.address)
    assert before.key == after.key
    with open_blocking_broker(redis_server.url) as broker:
        with pytest.raises(StaleOwner):
            append_rows(broker.fenced(before))
        assert broker.xlen("out") == 0
    first.release()
    assert second.check() is None


def test_lease_is_taken_over_in_time_after_the_clock_of_the_server_was_set_back(
    redis_server: RedisProcess, tmp_path: Path, leases: Any
) -> None:
    """The lease of the paused process then ends an hour later, by the clock of the server."""
    made = plan(redis_server.url, tmp_path / "c")
    first, second = leases(RunLease, made, lease_s=0.5), leases(OtherHost, made, lease_s=0.5)
    first.acquire()
    pause(first)
    with redis.Redis.from_url(redis_server.url) as server:
        assert server.pexpire(first._keys.running, 3_600_000)
        take_over(second)
    assert first.check() is not None
    assert second.check() is None


def test_hour_of_clock_difference_does_not_matter(
    redis_server: RedisProcess, tmp_path: Path, leases: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = plan(redis_server.url, tmp_path / "c")
    first, second = leases(RunLease, made), leases(OtherHost, made)
    first.acquire()
    true_time, true_monotonic = time.time, time.monotonic
    for offset in (3600, -3600):
        monkeypatch.setattr(time, "time", lambda offset=offset: true_time() + offset)
        monkeypatch.setattr(run_lease.time, "monotonic", lambda offset=offset: true_monotonic() + offset)
        with pytest.raises(CheckpointLocked):
            second.acquire()
        monkeypatch.undo()
    assert first.check() is None


def test_killed_process_of_this_machine_is_replaced_at_once(
    redis_server: RedisProcess, tmp_path: Path, leases: Any
) -> None:
    program = (
        "import sys, time; sys.path[:0] = [sys.argv[1]];"
        "from test_run_lease import RunLease, plan, Path;"
        "lease = RunLease(plan(sys.argv[2], Path(sys.argv[3])), lease_s=600); lease.acquire();"
        "print('held', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", program, str(Path(__file__).parent), redis_server.url, str(tmp_path / "c")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "held\n"
            lease = leases(RunLease, plan(redis_server.url, tmp_path / "c"))
            with pytest.raises(CheckpointLocked):
                lease.acquire()
        finally:
            process.send_signal(signal.SIGKILL)
    lease.acquire()
    assert lease.check() is None


def test_lease_is_written_again_when_redis_lost_its_data(
    redis_server: RedisProcess, tmp_path: Path, leases: Any
) -> None:
    made = plan(redis_server.url, tmp_path / "c")
    first, second = leases(RunLease, made), leases(OtherHost, made)
    first.acquire()
    redis.Redis(port=redis_server.port).flushall()
    first.verify(threading.Event())
    with pytest.raises(CheckpointLocked):
        second.acquire()
    with open_blocking_broker(redis_server.url) as broker:
        append_rows(broker.fenced(first.fence_for(first.address)))
        assert broker.xlen("out") == 3


def test_lease_is_lost_when_redis_lost_its_data_and_another_process_planned_batches(
    redis_server: RedisProcess, tmp_path: Path, leases: Any
) -> None:
    first = leases(RunLease, plan(redis_server.url, tmp_path / "c"))
    first.acquire()
    offsets = tmp_path / "c" / "spark" / "offsets"
    offsets.mkdir(parents=True)
    (offsets / "1").write_text("v1")
    redis.Redis(port=redis_server.port).flushall()
    with pytest.raises(LeaseLost):
        first.verify(threading.Event())


def test_equal_names_in_other_tenants_and_directories_do_not_collide(
    redis_server: RedisProcess, tmp_path: Path, leases: Any
) -> None:
    for number, tenant in enumerate(("a", "b", "b")):
        leases(RunLease, plan(redis_server.url, tmp_path / str(number), tenant=tenant)).acquire()


def test_keys_of_a_lease_expire(redis_server: RedisProcess, tmp_path: Path, leases: Any) -> None:
    lease = leases(RunLease, plan(redis_server.url, tmp_path / "c"))
    lease.acquire()
    client = redis.Redis(port=redis_server.port)
    names = {key.rpartition(b".")[2]: client.pttl(key) for key in client.scan_iter("{pipeline:*")}
    assert set(names) == {b"owner", b"running"}
    assert 0 < names[b"running"] <= 15_000 < names[b"owner"]


def test_batches_wait_for_the_lease_while_redis_is_away(tmp_path: Path, leases: Any) -> None:
    server = RedisProcess(port=free_port())
    lease = leases(RunLease, plan(server.url, tmp_path / "c"))
    lease.peek()
    lease.acquire()
    lease.checkpoint.open(plan(server.url, tmp_path / "c"))
    stopping = threading.Event()
    stopping.set()
    with pytest.raises(StopRequested):
        lease.verify(stopping)
    with server.start():
        lease.verify(threading.Event())
        assert lease.fence_option(lease.address) != "none"


def test_run_with_a_checkpoint_in_a_store_does_not_start_while_redis_is_away(tmp_path: Path, leases: Any) -> None:
    """Another process may run the pipeline, and no lock on the checkpoint shows it."""
    server = RedisProcess(port=free_port())
    made = plan(server.url, tmp_path / "c")
    lease = leases(InStore, made)
    with pytest.raises(BrokerUnavailable):
        lease.acquire()
    with server.start():
        other = leases(InStore, made)
        other.acquire()
        with pytest.raises(CheckpointLocked):
            lease.acquire()
        other.release()
        lease.acquire()
        assert lease.check() is None


def test_waiting_standby_does_not_read_the_checkpoint_again(
    redis_server: RedisProcess, tmp_path: Path, leases: Any
) -> None:
    made = plan(redis_server.url, tmp_path / "c")
    active, standby = leases(InStore, made), leases(InStore, made)
    active.acquire()
    with pytest.raises(CheckpointLocked):
        standby.acquire()
    record = tmp_path / "c" / "millstream.json"
    content = record.read_bytes()
    record.unlink()
    with pytest.raises(CheckpointLocked):
        standby.acquire()
    assert not record.exists()
    record.write_bytes(content)
    active.release()
    standby.acquire()
    assert standby.check() is None


class RefusingLease:
    """Raises these errors one after the other, then is acquired."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)

    def acquire(self) -> None:
        if self._errors:
            raise self._errors.pop(0)


AWAY = BrokerUnavailable("connection refused")
RUNS = CheckpointLocked("hdfs://namenode/c", "other", 7, "12:00")
NO_STORE = StorageUnavailable("hdfs://namenode/c", "connection refused")


@pytest.mark.parametrize("standby", [False, True])
@pytest.mark.parametrize("error", [AWAY, NO_STORE])
def test_start_waits_for_redis_and_the_store(tmp_path: Path, standby: bool, error: Exception) -> None:
    lines: list[str] = []
    made = plan("redis://127.0.0.1:1", tmp_path / "c")
    Runner([made.pipeline], standby=standby, say=lines.append)._acquire("orders", RefusingLease(error, error))
    [line] = lines
    assert "refused" in line


def test_standby_waits_through_outages_of_redis_and_the_store(tmp_path: Path) -> None:
    lines: list[str] = []
    made = plan("redis://127.0.0.1:1", tmp_path / "c", retry={"deadline": "1ms"})
    Runner([made.pipeline], standby=True, say=lines.append)._acquire(
        "orders", RefusingLease(RUNS, AWAY, AWAY, NO_STORE, RUNS)
    )
    assert "took over from process 7" in lines[-1]


def test_start_without_a_lease_ends_after_the_deadline(tmp_path: Path) -> None:
    made = plan("redis://127.0.0.1:1", tmp_path / "c", retry={"deadline": "1ms"})
    with pytest.raises(BrokerUnavailable):
        Runner([made.pipeline])._acquire("orders", RefusingLease(AWAY, AWAY, AWAY))


def test_run_without_a_lease_may_not_write_and_one_with_a_lease_may_try(tmp_path: Path, leases: Any) -> None:
    server = RedisProcess(port=free_port())
    lease = leases(RunLease, plan(server.url, tmp_path / "c"))
    lease.acquire()
    with pytest.raises(BrokerUnavailable):
        lease.require()
    with server.start():
        lease.require()
    lease.require()


def test_lease_that_cannot_be_verified_ends_after_the_deadline(tmp_path: Path, leases: Any) -> None:
    made = plan(f"redis://127.0.0.1:{free_port()}", tmp_path / "c", retry={"deadline": "100ms"})
    lease = leases(RunLease, made)
    lease.acquire()
    with pytest.raises(LeaseUnverified):
        lease.verify(threading.Event())


def test_released_lease_verifies_no_batch(redis_server: RedisProcess, tmp_path: Path, leases: Any) -> None:
    lease = leases(RunLease, plan(redis_server.url, tmp_path / "c"))
    lease.acquire()
    lease.release()
    with pytest.raises(StopRequested):
        lease.verify(threading.Event())


def test_pipeline_without_a_required_redis_has_the_local_lock_only(tmp_path: Path, leases: Any) -> None:
    files = {"type": "files", "config": {"id": "main", "path": str(tmp_path / "out")}}
    made = plan("redis://127.0.0.1:1", tmp_path / "c", sinks=[files], dlq={"enabled": False})
    first, second = leases(RunLease, made), leases(RunLease, made)
    first.acquire()
    first.verify(threading.Event())
    with pytest.raises(CheckpointLocked):
        second.acquire()


def test_lease_on_a_cluster_is_exclusive_and_has_no_fence_for_writes(
    cluster: ClusterSetup, tmp_path: Path, leases: Any
) -> None:
    made = plan(cluster.url, tmp_path / "c")
    first, second = leases(RunLease, made, lease_s=0.5), leases(OtherHost, made)
    first.acquire()
    with pytest.raises(CheckpointLocked):
        second.acquire()
    assert first.fence_for(first.address) is None
    pause(first)
    take_over(second)
    with pytest.raises(LeaseLost):
        first.verify(threading.Event())


def test_documented_rights_of_a_restricted_user_are_enough(tmp_path: Path, leases: Any) -> None:
    rights = "~{pipeline:* +get +set +getex +del +pttl +pexpire +time +evalsha"
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "pipeline-operation.md").read_text()
    assert rights in page
    with RedisProcess() as server:
        client = redis.Redis(port=server.port)
        client.execute_command("ACL", "SETUSER", "spark", "on", ">pw", "+script|load", "+ping", *rights.split())
        url = server.url.replace("://", "://spark:pw@")
        first = leases(RunLease, plan(url, tmp_path / "c"))
        first.acquire()
        first.verify(threading.Event())
        with pytest.raises(CheckpointLocked):
            leases(OtherHost, plan(url, tmp_path / "c")).acquire()
        client.delete(*client.scan_iter("*running"))
        first.verify(threading.Event())
        first.release()


def append_rows(broker: BlockingBroker) -> tuple[int, int]:
    rows = UniformRows([b"n"], [pa.array([b"1", b"2", b"3"], pa.binary())])
    once = BulkOnce("out", "app/main", 7, partition="0", digest=Digest())
    return broker.run(once.append_uniform, rows)


@pytest.mark.parametrize("embedded", [True, False], ids=["embedded", "redis"])
def test_fenced_bulk_append_writes_all_or_nothing(redis_server: RedisProcess, embedded: bool) -> None:
    with open_blocking_broker("local://" if embedded else redis_server.url) as broker:
        fence = Fence(b"{pipeline:x}.owner", b"1 me")
        for existing in (False, True):
            before = broker.stream_info("out").last_generated if existing else None
            with pytest.raises(StaleOwner):
                append_rows(broker.fenced(fence))
            assert broker.xlen("out") == (1 if existing else 0)
            assert before is None or broker.stream_info("out").last_generated == before
            if not existing:
                broker.xadd("out", {"n": "0"})
        broker.run(run_lease.lock_keys, [fence.key], fence.record, ttl_ms=60_000)
        assert append_rows(broker.fenced(fence)) == (3, 0)
        assert append_rows(broker.fenced(fence)) == (0, 3)
        assert broker.xlen("out") == 4
