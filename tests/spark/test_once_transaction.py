"""The transaction of the bulk writer: a rejected one changes nothing, an interrupted one is complete or absent."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pytest

from millstream import BlockingBroker, open_blocking_broker
from millstream.broker.broker import Broker
from millstream.broker.keys import slot_of
from millstream.broker.open import open_broker
from millstream.broker.scripts.append_once import Digest, Once, RowsMissing
from millstream.errors import (
    IdTooSmall,
    MillstreamError,
    NonDeterministicReplay,
    OutOfMemory,
    PermissionDenied,
    ReadOnlyReplica,
    ServerError,
    StaleWriter,
    WrongKeyType,
)
from millstream.spark.bulk import BulkOnce, UniformRows
from millstream.testing import ClusterSetup, RedisProcess, ServedBroker
from millstream.testing.topologies import ask
from millstream.testing.waiting import wait_until
from millstream.wire.commands import Batch, ErrorReply

MARKERS = "{s}.once:w"


@pytest.fixture(params=["redis", "millstream serve", "local"])
def broker(request: pytest.FixtureRequest) -> Iterator[BlockingBroker]:
    if request.param == "millstream serve":
        with ServedBroker() as server, open_blocking_broker(server.url, deadline_ms=500) as served:
            yield served
        return
    url = request.getfixturevalue("redis_url") if request.param == "redis" else f"local://{uuid4().hex}"
    with open_blocking_broker(url, deadline_ms=500, max_stream_len=None) as opened:
        yield opened


def run_command(broker: BlockingBroker, *args: str) -> Any:
    return broker.transport.call_many(Batch([tuple(map(str.encode, args))], b"s"))[0]


def rows(*values: bytes) -> UniformRows:
    return UniformRows([b"event", b"id"], [pa.array(values, pa.binary()), pa.array([b""] * len(values), pa.binary())])


def writer(epoch: int = 5, position: int = 0, *before: bytes) -> BulkOnce:
    digest = Digest()
    digest.add([b"event", value, b"id", b""] for value in before)
    return BulkOnce("s", "w", epoch, position=position, digest=digest)


def append(broker: BlockingBroker, once: BulkOnce, *values: bytes) -> tuple[int, int]:
    return broker.run(once.append_uniform, rows(*values))


def everything(broker: BlockingBroker) -> Any:
    return [
        run_command(broker, *args)
        for args in (
            ("TYPE", "s"),
            ("XINFO", "STREAM", "s", "FULL", "COUNT", "0"),
            ("XINFO", "GROUPS", "s"),
            ("PEXPIRETIME", "s"),
            ("TYPE", MARKERS),
            ("HGETALL", MARKERS),
            ("EXISTS", "{s}.once.gate"),
        )
    ]


def plain(state: Any) -> Any:
    """Errors as texts, so that they can be compared."""
    if isinstance(state, list):
        return [plain(item) for item in state]
    return state.text if isinstance(state, ErrorReply) else state


def use_stream(broker: BlockingBroker) -> None:
    """A stream with pending entries, a lagging group, a deleted last entry, trimmed entries and a TTL."""
    ids = broker.xadd_many("s", [{"n": n} for n in range(10)])
    broker.create_group("s", "g", start="0")
    broker.create_group("s", "h", start=ids[7])
    broker.xreadgroup("s", "g", "c", count=4)
    broker.xdel("s", [ids[5], ids[9]])
    run_command(broker, "XTRIM", "s", "MAXLEN", "6")
    run_command(broker, "PEXPIRE", "s", "10000000")


def emptied(broker: BlockingBroker) -> None:
    ids = broker.xadd_many("s", [{"n": n} for n in range(3)])
    broker.xdel("s", ids)


def set_ahead(broker: BlockingBroker) -> None:
    run_command(broker, "XADD", "s", "5-5", "n", "1")
    run_command(broker, "XSETID", "s", "99999999999999-7", "ENTRIESADDED", "77", "MAXDELETEDID", "88-8")


SCENES: list[Callable[[BlockingBroker], None]] = [use_stream, emptied, set_ahead, lambda broker: None]


@pytest.mark.parametrize("scene", SCENES)
def test_rejected_transaction_changes_nothing(broker: BlockingBroker, scene: Callable[[BlockingBroker], None]) -> None:
    scene(broker)
    if scene is SCENES[-1]:
        append(broker, writer(), b"1", b"2")
        run_command(broker, "DEL", "s")  # there are markers, but no stream
    else:
        append(broker, writer(), b"1", b"2")
    before = plain(everything(broker))

    with pytest.raises(StaleWriter):
        append(broker, writer(4), b"1", b"2")
    with pytest.raises(RowsMissing):
        append(broker, writer(5, 3, b"1", b"2", b"3"), b"4")
    with pytest.raises(NonDeterministicReplay):
        append(broker, writer(5, 2, b"1", b"other"), b"3")
    assert append(broker, writer(), b"1", b"2") == (0, 2)

    assert plain(everything(broker)) == before
    assert append(broker, writer(5, 2, b"1", b"2"), b"3") == (1, 0)


@pytest.mark.parametrize(
    ("spoilt", "error"),
    [
        (("SET", "s", "no stream"), WrongKeyType),
        (("XADD", "s", "18446744073709551615-5", "n", "1"), IdTooSmall),
        (("XADD", "s", "18446744073709551615-18446744073709551615", "n", "1"), IdTooSmall),
        (("SET", MARKERS, "no hash"), WrongKeyType),
        (("HSET", MARKERS, "0", "no marker"), ServerError),
    ],
)
@pytest.mark.parametrize("scene", ["on a stream", "without a stream"])
def test_rows_that_cannot_be_written_change_nothing(
    broker: BlockingBroker, spoilt: tuple[str, ...], error: type[MillstreamError], scene: str
) -> None:
    if scene == "on a stream" and spoilt[0] != "SET":
        use_stream(broker)
    run_command(broker, *spoilt)
    before = plain(everything(broker))

    with pytest.raises(error):
        append(broker, writer(), b"1", b"2")

    assert plain(everything(broker)) == before


@pytest.mark.parametrize("exists", [True, False])
def test_blocked_readers_are_not_woken_by_a_rejected_transaction(broker: BlockingBroker, exists: bool) -> None:
    append(broker, writer(), b"1")
    (last,) = broker.xrange("s")
    if not exists:
        broker.delete("s")
    received: list[Any] = []
    reader = threading.Thread(target=lambda: received.append(broker.xread({"s": last.id}, block_ms=0)))
    reader.start()
    wait_until(lambda: waiting(broker) == 1, what="a blocked reader")

    with pytest.raises(StaleWriter):
        append(broker, writer(4), b"no")
    assert waiting(broker) == 1
    append(broker, writer(6), b"yes")

    reader.join(20)
    ((entry,),) = received[0].values()
    assert entry.fields[b"event"] == b"yes"


def waiting(broker: BlockingBroker) -> int:
    return int(broker.server_info("clients")["blocked_clients"])


@pytest.mark.parametrize("seed", range(6))
def test_bulk_append_has_the_same_result_as_append_once(broker: BlockingBroker, seed: int) -> None:
    """Several writers, versions, replays and stale writers: each step has the same result, rows and markers."""
    rng = random.Random(seed)
    rows_by_writer: dict[tuple[int, int], list[bytes]] = {}
    for _ in range(40):
        writer_number, epoch = rng.randrange(2), rng.randint(1, 3)
        version = (writer_number, epoch)
        version_rows = rows_by_writer.setdefault(
            version, [b"%d %d %d" % (*version, n) for n in range(rng.randint(1, 30))]
        )
        values = list(version_rows[: rng.randint(1, len(version_rows))])
        if rng.random() < 0.2:
            values[rng.randrange(len(values))] = b"other"
        start = rng.choice((0, 0, 0, rng.randrange(len(values))))
        cuts = [start, *sorted(rng.randrange(start, len(values) + 1) for _ in range(2)), len(values)]
        outcomes = []
        for short in (True, False):
            digest = Digest()
            digest.add([b"event", value, b"id", b""] for value in values[:start])
            kind = BulkOnce if short else Once
            once = kind(f"s{short}", f"w{writer_number}", epoch, position=start, digest=digest)
            outcome: list[Any] = []
            try:
                for first, past in pairwise(cuts):
                    if first == past:
                        continue
                    if isinstance(once, BulkOnce):
                        outcome.append(broker.run(once.append_uniform, rows(*values[first:past])))
                    else:
                        appended = broker.run(once.append_rows, list(rows(*values[first:past])))
                        outcome.append((appended.added, appended.skipped))
                broker.run(once.finish)
            except MillstreamError as error:
                outcome.append(type(error))
            stream = f"s{short}"
            markers = [run_command(broker, "HGET", f"{{{stream}}}.once:w{n}", "0") for n in range(2)]
            stored = [entry.fields for entry in broker.xrange(stream)]
            outcomes.append((outcome, stored, [marker and marker.split(b" ")[:3] for marker in markers]))
        assert outcomes[0] == outcomes[1], seed


# --- rejections by the server ----------------------------------------------------------------------


def test_out_of_memory_rejects_whole_chunks(broker: BlockingBroker) -> None:
    append(broker, writer(), b"1")
    used = int(broker.server_info("memory")["used_memory"])
    run_command(broker, "CONFIG", "SET", "maxmemory", str(used + 3_000_000))
    once = writer(6)
    many = [b"%d" % n + b"x" * 200 for n in range(50_000)]
    try:
        with pytest.raises(OutOfMemory):
            append(broker, once, *many)
    finally:
        run_command(broker, "CONFIG", "SET", "maxmemory", "0")
    stored = int(run_command(broker, "HGET", MARKERS, "0").split(b" ")[1])
    assert stored > 0
    assert stored % 1000 == 0
    assert broker.xlen("s") == 1 + stored
    assert once.position == 0, "the writer stands where it stood, and takes the same rows again"
    append(broker, once, *many)
    assert once.position == len(many)
    assert broker.xlen("s") == 1 + len(many)


def test_out_of_memory_before_exec_writes_nothing(redis_url: str) -> None:
    """The server checks memory at EXEC for all queued commands, and not between them."""
    with open_blocking_broker(redis_url) as broker:
        session = broker.transport.open_own(broker.transport.primaries()[0])
        try:
            session.exchange([(b"MULTI",), (b"XADD", b"s", b"*", b"n", b"1")], 0, whole=True)
            run_command(broker, "CONFIG", "SET", "maxmemory", "1")
            (refused,) = session.exchange([(b"EXEC",)], 0, whole=True)
        finally:
            run_command(broker, "CONFIG", "SET", "maxmemory", "0")
            session.close()
        assert refused.text.startswith("EXECABORT Transaction discarded because of: OOM")
        assert broker.xlen("s") == 0


@pytest.mark.parametrize("missing", ["eval", "xsetid", "del", "xadd", "exec"])
def test_missing_permission_writes_nothing(redis_server: RedisProcess, missing: str) -> None:
    ask(redis_server, "ACL", "SETUSER", "poor", "reset", "on", ">pw", "~*", "+@all", f"-{missing}")
    try:
        with (
            open_blocking_broker(f"redis://poor:pw@127.0.0.1:{redis_server.port}") as poor,
            open_blocking_broker(redis_server.url) as broker,
        ):
            append(broker, writer(), b"1")
            before = plain(everything(broker))
            for epoch in (4, 5, 6):  # rejected, skipped, added
                with pytest.raises(PermissionDenied):
                    append(poor, writer(epoch), b"1")
            assert plain(everything(broker)) == before
    finally:
        ask(redis_server, "ACL", "DELUSER", "poor")


def test_replica_and_primary_without_replicas_reject_the_transaction() -> None:
    with RedisProcess(["--repl-diskless-sync-delay", "0"]) as primary:
        with (
            RedisProcess(["--replicaof", "127.0.0.1", str(primary.port)]) as replica,
            open_blocking_broker(primary.url, deadline_ms=100) as broker,
            open_blocking_broker(replica.url, deadline_ms=100) as copy,
        ):
            append(broker, writer(), b"1", b"2")
            wait_until(lambda: plain(everything(copy)) == plain(everything(broker)), what="the replica")
            with pytest.raises(ReadOnlyReplica):
                append(copy, writer(6), b"3")
            with pytest.raises(StaleWriter):
                append(broker, writer(4), b"no")
            append(broker, writer(6), b"3")
            wait_until(lambda: copy.xlen("s") == 3, what="the replica")
            assert plain(everything(copy)) == plain(everything(broker))
        with open_blocking_broker(primary.url, deadline_ms=100) as broker:
            before = plain(everything(broker))
            run_command(broker, "CONFIG", "SET", "min-replicas-to-write", "1")
            with pytest.raises(ServerError, match="NOREPLICAS"):
                append(broker, writer(7), b"4")
            assert plain(everything(broker)) == before


def test_truncated_append_only_file_has_whole_transactions() -> None:
    """After a crash a transaction and its marker are complete or absent."""
    with RedisProcess(["--appendonly", "yes", "--appendfsync", "always"]) as server:
        with open_blocking_broker(server.url) as broker:
            append(broker, writer(), b"1", b"2")
            with pytest.raises(StaleWriter):
                append(broker, writer(4), b"no")
            rejected_state = plain(everything(broker))
            (file,) = server.directory.glob("appendonlydir/*.incr.aof")
            first = file.stat().st_size
            with pytest.raises(StaleWriter):
                append(broker, writer(4), b"no")
            second = file.stat().st_size
            append(broker, writer(5, 2, b"1", b"2"), b"3", b"4", b"5")
            full = plain(everything(broker))
        server.kill()
        written = file.read_bytes()
        cuts = [first, (first + second) // 2, second - 1, second, *range(second + 40, len(written), 150)]
        for end in [len(written), *cuts]:
            file.write_bytes(written[:end])
            server.start()
            with open_blocking_broker(server.url) as broker:
                expected = full if end == len(written) else rejected_state
                assert without_times(everything(broker)) == without_times(expected), end
            server.kill()


def without_times(state: Any) -> Any:
    return [item for index, item in enumerate(plain(state)) if index != 3]


def test_transaction_survives_a_restart_with_a_journal(tmp_path: Path) -> None:
    url = f"local://{tmp_path}"
    with open_blocking_broker(url, max_stream_len=None) as broker:
        set_ahead(broker)
        append(broker, writer(), b"1", b"2")
        with pytest.raises(StaleWriter):
            append(broker, writer(4), b"no")
        before = plain(everything(broker))
    with open_blocking_broker(url, max_stream_len=None) as broker:
        assert plain(everything(broker)) == before


def test_streams_are_trimmed_to_the_brokers_limit(redis_url: str) -> None:
    """As with every other append, if the broker was opened with ``max_stream_len``."""
    values = [b"%d" % n for n in range(10)]
    for url in (redis_url, f"local://{uuid4().hex}"):
        with open_blocking_broker(url, max_stream_len=100) as broker:
            for epoch in range(30):
                assert append(broker, writer(epoch), *values) == (10, 0)
            assert 100 <= broker.xlen("s") <= 120
            for _ in range(30):
                assert append(broker, writer(29), *values) == (0, 10)
            broker.create_group("s", "g", start="0")
            for epoch in range(30, 60):
                append(broker, writer(epoch), *values)
            assert broker.xlen("s") >= 400, "the group has read nothing: nothing may go"


async def test_event_loops_run_it_too(redis_url: str) -> None:
    for url in (redis_url, f"local://{uuid4().hex}"):
        async with open_broker(url) as broker:
            assert isinstance(broker, Broker)
            assert await broker.run(writer().append_uniform, rows(b"1", b"2")) == (2, 0)
            assert await broker.run(writer().append_uniform, rows(b"1", b"2", b"3")) == (1, 2)


def test_bulk_append_on_a_cluster(cluster: ClusterSetup) -> None:
    with open_blocking_broker(cluster.url) as broker:
        for _ in range(12):
            name = f"bulk:{uuid4().hex}"
            assert broker.run(BulkOnce(name, "w", 1, digest=Digest()).append_uniform, rows(b"1", b"2")) == (2, 0)
            assert broker.run(BulkOnce(name, "w", 1, digest=Digest()).append_uniform, rows(b"1", b"2", b"3")) == (1, 2)
            with pytest.raises(StaleWriter):
                broker.run(BulkOnce(name, "w", 0, digest=Digest()).append_uniform, rows(b"1"))
            assert broker.xlen(name) == 3
            broker.delete_stream(name, companions=True)


def test_bulk_append_while_a_slot_moves(resharded_cluster: ClusterSetup) -> None:
    """A transaction waits while its slot moves, because neither node has all of its keys meanwhile."""
    cluster = resharded_cluster
    with open_blocking_broker(cluster.url) as broker:
        assert append(broker, writer(), b"1") == (1, 0)
        slot = slot_of(b"s")
        source = cluster.owner(slot)
        target = next(node for node in cluster.nodes if node is not source)
        done: list[Any] = []
        cluster.begin_move(slot, target)
        waiting = threading.Thread(target=lambda: done.append(append(broker, writer(5, 1, b"1"), b"2", b"3")))
        waiting.start()
        ask(source, "MIGRATE", "127.0.0.1", str(target.port), "", "0", "5000", "KEYS", "s", MARKERS)
        cluster.end_move(slot, target)
        waiting.join(30)
        assert done == [(2, 0)]
        assert [entry.fields[b"event"] for entry in broker.xrange("s")] == [b"1", b"2", b"3"]
