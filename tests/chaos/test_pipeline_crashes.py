"""A pipeline is killed at random moments and restarted: each row is in each sink once."""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from millstream.pipelines.checkpoint import Checkpoint
from millstream.testing import RedisProcess, wait_until
from support.pipeline_process import PipelineProcess

TRIALS = int(os.environ.get("TRIALS", "1"))

pytestmark = [pytest.mark.spark, pytest.mark.chaos, pytest.mark.timeout(600 + 60 * TRIALS)]

SEED = int(os.environ.get("SEED", random.SystemRandom().randrange(10**6)))
ROWS = 3000 if TRIALS >= 20 else 900
SPEC = """\
apiVersion: millstream/v1
kind: Pipeline
metadata: {name: crashing}
spec:
  source: {type: generator, config: {rows: ROWS, rate: 600}}
  processors: PROCESSORS
  sinks:
    - {type: redis, config: {id: one, uri: "URL", stream: one}}
    - {type: redis, config: {id: two, uri: "URL", stream: two}}
    - {type: redis, config: {id: routed, uri: "URL", stream: "routed.${source.table}"}}
    - {type: redis, config: {id: optional, uri: "URL", stream: optional, required: false}}
  batch: {max_events: 150}
  checkpoint: {path: CHECKPOINT}
  spark: {master: "local[2]"}
"""
PLANS = {
    "in order": "[]",
    "shuffled": '[{type: sql, query: "SELECT id, key, op, `table`, after, before, ts_ms FROM events ORDER BY rand()"}]',
}


def balance(client: redis.Redis, streams: list[str]) -> tuple[int, int]:
    """Rows that are missing, and rows that are stored more than once."""
    ids = [fields[b"id"] for stream in streams for _, fields in client.xrange(stream)]
    times = Counter(ids)
    wanted = {b"generator-42:%d" % n for n in range(ROWS)}
    return len(wanted - set(times)), sum(times.values()) - len(times)


at_length = pytest.mark.skipif(TRIALS < 5, reason="one plan of each kind with fewer trials")


@pytest.mark.parametrize("kind", ["in order", pytest.param("shuffled", marks=at_length)])
def test_pipeline_killed_at_random_moments_loses_and_duplicates_nothing(kind: str, tmp_path: Path) -> None:
    dice = random.Random(f"{SEED}-{kind}")
    print(f"\nSEED={SEED} TRIALS={TRIALS} {kind}")
    with RedisProcess() as server:
        client = redis.Redis(port=server.port)
        spec = tmp_path / "crashing.yaml"
        text = SPEC.replace("ROWS", str(ROWS)).replace("URL", server.url).replace("PROCESSORS", PLANS[kind])
        spec.write_text(text.replace("CHECKPOINT", str(tmp_path / "checkpoint")))

        def length() -> int:
            return int(client.xlen("one"))

        for trial in range(TRIALS):
            held = length()
            running = PipelineProcess(spec)
            try:
                wait_until(lambda held=held: length() > held or length() == ROWS, what="progress", timeout_s=120)
                time.sleep(dice.uniform(0, 1.5))  # the moment is what this test draws lots for
            finally:
                running.kill()
            print(f"killed {trial + 1} with {length()} of {ROWS} rows in the stream")
        # Rows that are due are read now; later rows when they are due.
        drained = False
        while not drained or length() < ROWS or client.xlen("optional") < ROWS:
            PipelineProcess(spec, "--once").finish(240)
            drained = True
        for streams in (["one"], ["two"], ["routed.orders", "routed.customers", "routed.payments"], ["optional"]):
            lost, doubled = balance(client, streams)
            print(f"LEDGER {kind} {'+'.join(streams)} produced={ROWS} lost={lost} duplicates={doubled}")
            assert (lost, doubled) == (0, 0)


# --- with state: which rows went through before the crash is what Spark must remember ---

BATCH = 40
PAIRS = 100 + 60 * TRIALS  # about three batches for each kill
STEP_MS, WINDOW_MS, START_MS = 1000, 10_000, 1_700_000_000_000
STATEFUL = """\
apiVersion: millstream/v1
kind: Pipeline
metadata: {name: crashing}
spec:
  source: {type: redis, config: {uri: "URL", stream: in}}
  processors: [PROCESSOR]
  sinks:
    - {type: redis, config: {id: one, uri: "URL", stream: one}}
    - {type: redis, config: {id: two, uri: "URL", stream: two}}
    - {type: redis, config: {id: optional, uri: "URL", stream: optional, required: false}}
  batch: {max_events: BATCH}
  checkpoint: {path: CHECKPOINT}
  spark: {master: "local[2]"}
"""
DEDUPLICATE = "{type: deduplicate, keys: [row.n], watermark: 1 day}"
AGGREGATE = (
    "{type: aggregate, id: sums, window: 10s, watermark: 1s, group_by: [row.g], "
    "measures: {n: count, total: sum(row.n)}}"
)
Found = Counter[tuple[object, ...]]


def event(number: int, at_ms: int) -> dict[str, str]:
    document = {"op": "c", "ts_ms": at_ms, "after": {"n": number, "g": number % 3}}
    return {"event": json.dumps(document)}


def after(client: redis.Redis, stream: str) -> list[dict[str, Any]]:
    return [json.loads(fields[b"event"])["after"] for _, fields in client.xrange(stream)]


def fill_pairs(client: redis.Redis, dice: random.Random) -> Found:
    """Adds every number twice, the second one near the first or far from it. Each must be in the output once."""
    order = [*range(PAIRS)]
    for number in range(PAIRS):
        order.insert(min(len(order), order.index(number) + dice.choice([1, 5, 60])), number)
    for place, number in enumerate(order):
        client.xadd("in", event(number, START_MS + place * STEP_MS))
    return Counter((number,) for number in range(PAIRS))


def fill_windows(client: redis.Redis, dice: random.Random) -> Found:
    """Adds numbers in the order of their times. The output must have every window of every group once, with its sum."""
    sums: dict[tuple[int, int], list[int]] = {}
    for number in range(2 * PAIRS):
        at = START_MS + number * STEP_MS
        client.xadd("in", event(number, at))
        sums.setdefault((at - at % WINDOW_MS, number % 3), []).append(number)
    return Counter((start, group, len(each), float(sum(each))) for (start, group), each in sums.items())


def pairs_in(client: redis.Redis, stream: str) -> Found:
    return Counter((row["n"],) for row in after(client, stream))


def windows_in(client: redis.Redis, stream: str) -> Found:
    rows = [row for row in after(client, stream) if row["window_start"] < START_MS + 2 * PAIRS * STEP_MS]
    return Counter((row["window_start"], int(row["g"]), row["n"], row["total"]) for row in rows)


@pytest.mark.timeout(300 + 60 * TRIALS)
@pytest.mark.parametrize(
    ("processor", "fill", "found"),
    [
        pytest.param(DEDUPLICATE, fill_pairs, pairs_in, marks=at_length),
        pytest.param(AGGREGATE, fill_windows, windows_in, marks=pytest.mark.at_length),
    ],
    ids=["deduplicate", "aggregate"],
)
def test_pipeline_killed_with_state_in_memory_restores_it(
    processor: str,
    fill: Callable[[redis.Redis, random.Random], Found],
    found: Callable[[redis.Redis, str], Found],
    tmp_path: Path,
) -> None:
    dice = random.Random(f"{SEED}-{processor}")
    print(f"\nSEED={SEED} TRIALS={TRIALS} {processor}")
    with RedisProcess() as server:
        client = redis.Redis(port=server.port)
        wanted = fill(client, dice)
        spec, checkpoint = tmp_path / "crashing.yaml", Checkpoint(tmp_path / "checkpoint")
        text = STATEFUL.replace("PROCESSOR", processor).replace("URL", server.url).replace("BATCH", str(BATCH))
        spec.write_text(text.replace("CHECKPOINT", str(checkpoint.path)))

        def committed() -> int:
            last = checkpoint.last_committed()
            return -1 if last is None else last

        for trial in range(TRIALS):
            held = committed()
            running = PipelineProcess(spec)
            try:
                wait_until(
                    lambda held=held: committed() > held or committed() >= 2 * PAIRS // BATCH,
                    what="a batch",
                    timeout_s=120,
                )
                time.sleep(dice.uniform(0, 1.5))  # the moment is what this test draws lots for
            finally:
                running.kill()
            print(f"killed {trial + 1} after batch {committed()}, {client.xlen('one')} rows in the stream")
        # A window closes when a later event has moved the watermark; it leaves with the batch after that.
        for late in range(1, 4):
            client.xadd("in", event(0, START_MS + (2 * PAIRS + late * 100) * STEP_MS))
            PipelineProcess(spec, "--once").finish(240)
            if all(found(client, stream) == wanted for stream in ("one", "two", "optional")):
                break
        for stream in ("one", "two", "optional"):
            rows = found(client, stream)
            lost, doubled = wanted - rows, rows - wanted
            print(
                f"LEDGER {processor[7:18]} {stream} wanted={wanted.total()} lost={lost.total()} "
                f"duplicates={doubled.total()}"
            )
            assert (lost, doubled) == (Counter(), Counter())


def test_ledger_finds_planted_losses_and_duplicates(tmp_path: Path) -> None:
    """A planted fault: rows written twice and rows left out are found."""
    with RedisProcess() as server:
        client = redis.Redis(port=server.port)
        for n in (*range(ROWS - 2), 7):
            client.xadd("one", {"id": f"generator-42:{n}"})
        assert balance(client, ["one"]) == (2, 1)
