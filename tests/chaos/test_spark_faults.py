"""A Spark query and a pipeline go on while their Redis refuses, in every way that passes: every row arrives, once."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from chaos.planting import PASSES, Planting
from chaos.test_pipeline_crashes import Running
from chaos.test_spark_crashes import Driver
from millstream import BlockingBroker, open_blocking_broker
from millstream.testing import AnsweringProxy, RedisProcess, wait_until
from millstream.testing.answering import pass_on
from millstream.testing.fault_table import TABLE, Fault, Follows, Phase

IN_FULL = int(os.environ.get("TRIALS", "1")) > 2
ROWS = 100
PIPELINE = """\
apiVersion: millstream/v1
kind: Pipeline
metadata: {name: refused}
spec:
  source: {type: redis, config: {uri: "URL", stream: in}}
  sinks:
    - {type: redis, config: {id: one, uri: "URL", stream: one, envelope: raw}}
    - {type: redis, config: {id: optional, uri: "URL", stream: optional, envelope: raw, required: false}}
  checkpoint: {path: CHECKPOINT}
  spark: {master: "local[2]"}
"""

pytestmark = [pytest.mark.spark, pytest.mark.chaos, pytest.mark.timeout(900)]


def passing() -> list[tuple[Fault, Phase]]:
    """What a query or a pipeline must live through. It waits for nothing, and sends its scripts as text."""
    cells = [
        (fault, phase)
        for fault in TABLE
        for phase in (Phase.CONNECTING, Phase.COMMAND, Phase.TRANSACTION)
        if fault.follows(phase) in (*PASSES, Follows.PERHAPS) and fault.name != "NOSCRIPT"
    ]
    return cells if IN_FULL else cells[::4]


def add_rows(broker: BlockingBroker, first: int) -> None:
    broker.xadd_many("in", [{"event": f"{first + n}", "id": f"{first + n}"} for n in range(ROWS)])


def live_through(server: RedisProcess, proxy: AnsweringProxy, outputs: list[str], alive: Callable[[], bool]) -> int:
    """Fault after fault, and rows for each; returns how many rows there were."""
    chance = random.Random(3)
    with open_blocking_broker(server.url) as steady:
        add_rows(steady, 0)
        sent = ROWS
        for fault, phase in passing():
            wait_until(arrived(steady, outputs, sent, alive), what=f"{sent} rows", timeout_s=180)
            planting = Planting(fault, phase, server.port)
            proxy.choose = planting
            planting.begun = True
            if phase is Phase.CONNECTING:
                proxy.cut_all()
            add_rows(steady, sent)
            sent += ROWS
            wait_until(lambda p=planting: p.refused, what=f"{fault.name} {phase.value}", timeout_s=120)
            print(f"{fault.name}, {phase.value}: refused {planting.refused}")
            if chance.random() < 0.5:
                proxy.choose = pass_on
        wait_until(arrived(steady, outputs, sent, alive), what=f"{sent} rows", timeout_s=180)
    return sent


def arrived(broker: BlockingBroker, outputs: list[str], rows: int, alive: Callable[[], bool]) -> Callable[[], bool]:
    def look() -> bool:
        assert alive(), "it ended by itself"
        return all(broker.xlen(stream) >= rows for stream in outputs)

    return look


def balance(server: RedisProcess, stream: str, rows: int) -> tuple[int, int]:
    with open_blocking_broker(server.url) as steady:
        times = Counter(entry.fields[b"event"] for entry in steady.xrange(stream))
    wanted = {b"%d" % n for n in range(rows)}
    return len(wanted - times.keys()), sum(times.values()) - len(times)


def test_a_copy_goes_on_while_its_server_refuses(tmp_path: Path) -> None:
    with RedisProcess() as server, AnsweringProxy(server.port) as proxy:
        source = {"subscribe": "in", "startingOffsets": "earliest"}
        driver = Driver(
            *("copy", tmp_path),
            url=proxy.url,
            source=source,
            sink={"stream": "out"},
            checkpoint=str(tmp_path / "checkpoint"),
        )
        try:
            rows = live_through(server, proxy, ["out"], lambda: driver.process.poll() is None)
        finally:
            driver.kill()
        found = balance(server, "out", rows)
    print(f"LEDGER copy rows={rows} (lost, duplicates)={found}")
    assert found == (0, 0)


def test_a_pipeline_goes_on_while_its_server_refuses(tmp_path: Path) -> None:
    with RedisProcess() as server, AnsweringProxy(server.port) as proxy:
        spec = tmp_path / "refused.yaml"
        spec.write_text(PIPELINE.replace("URL", proxy.url).replace("CHECKPOINT", str(tmp_path / "checkpoint")))
        running = Running(spec)
        try:
            rows = live_through(server, proxy, ["one", "optional"], lambda: running.process.poll() is None)
        finally:
            log = (tmp_path / "refused.log").read_text()
            running.kill()
        found = {stream: balance(server, stream, rows) for stream in ("one", "optional")}
    print(f"LEDGER pipeline rows={rows} (lost, duplicates)={found}")
    assert set(found.values()) == {(0, 0)}, log[-3000:]
