"""What an operator does with a real slot from outside: drops it with the checkpoint, has it examined, watches it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from following import Follower
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner, Result

from millstream.cli.main import build
from millstream.errors import MillstreamError
from millstream.observe import PipelineMetrics
from millstream.pipelines import Checkpoint, load_pipeline
from millstream.pipelines.plan import make_plan
from millstream.pipelines.status import SlotWatch
from millstream.testing import PostgresDatabase, wait_until

SPEC = """\
apiVersion: millstream/v1
kind: Pipeline
metadata: {name: shop}
spec:
  source: {type: postgres, config: {dsn: "DSN", tables: [orders], slot: SLOT, create: true}}
  sinks: [{type: redis, config: {id: out, uri: "redis://127.0.0.1:1", stream: out}}]
  checkpoint: {path: CHECKPOINT}
"""


@dataclass(frozen=True)
class Shop:
    """A pipeline that has run: its file, its checkpoint and its slot are there, and nobody reads the slot."""

    database: PostgresDatabase
    file: Path
    checkpoint: Path
    slot: str
    follower: Follower

    @property
    def slots(self) -> list[str]:
        found = self.database.execute("SELECT slot_name FROM pg_replication_slots WHERE database = current_database()")
        return [name for (name,) in found]

    @property
    def active(self) -> bool:
        [(found,)] = self.database.execute(f"SELECT active FROM pg_replication_slots WHERE slot_name = '{self.slot}'")
        return bool(found)

    def typed(self, *words: str) -> Result:
        return CliRunner().invoke(build([words[0]]), [*words, str(self.file)])

    def answered(self, answers: str) -> subprocess.CompletedProcess[str]:
        """``millstream pipeline reset`` before a terminal: questions are asked only there."""
        ours, theirs = os.openpty()
        try:
            os.write(ours, answers.encode())
            words = [sys.executable, "-m", "millstream", "pipeline", "reset", str(self.file)]
            return subprocess.run(words, stdin=theirs, capture_output=True, text=True, timeout=120, check=False)
        finally:
            os.close(ours)
            os.close(theirs)


@pytest.fixture
def shop(postgres: PostgresDatabase, tmp_path: Path) -> Iterator[Shop]:
    postgres.execute("CREATE TABLE orders (id int PRIMARY KEY)", "INSERT INTO orders VALUES (1)")
    file, checkpoint, slot = tmp_path / "shop.yaml", tmp_path / "checkpoint", f"shop_{postgres.name}"
    file.write_text(SPEC.replace("DSN", postgres.dsn).replace("SLOT", slot).replace("CHECKPOINT", str(checkpoint)))
    Checkpoint(checkpoint).open(make_plan(load_pipeline(file)))
    follower = Follower(postgres, checkpoint / "segments", tables="orders", slot=slot)
    assert len(follower.drain()) == 1
    follower.stop()
    made = Shop(postgres, file, checkpoint, slot, follower)
    wait_until(lambda: not made.active, what="the slot's release", timeout_s=60)
    yield made
    follower.stop()


# --- reset ---------------------------------------------------------------------------------------------------------


def test_reset_offers_to_drop_the_slot_and_a_no_keeps_it(shop: Shop) -> None:
    said = shop.answered("y\nn\n")
    assert said.returncode == 0, said.stderr
    told = " ".join(said.stderr.split())
    assert f"slot {shop.slot} at 127.0.0.1:{shop.database.server.port}/{shop.database.name} stays" in told
    assert "bytes of log" in told
    assert f"SELECT pg_drop_replication_slot('{shop.slot}')" in told, "how to drop it later: the checkpoint is gone"
    assert not shop.checkpoint.exists()
    assert shop.slots == [shop.slot]


def test_reset_drops_the_slot_after_a_yes(shop: Shop) -> None:
    said = shop.answered("y\ny\n")
    assert said.returncode == 0, said.stderr
    assert not shop.checkpoint.exists()
    assert shop.slots == []


def test_yes_in_advance_drops_both_and_the_next_start_begins_anew(shop: Shop) -> None:
    assert shop.typed("pipeline", "reset", "--yes").exit_code == 0
    assert not shop.checkpoint.exists()
    assert shop.slots == []
    again = Follower(shop.database, shop.checkpoint / "segments", tables="orders", slot=shop.slot)
    assert [event["op"] for event in again.drain()] == ["r"]
    again.stop()


def test_a_slot_that_is_read_is_not_dropped_and_reset_says_what_to_do(shop: Shop) -> None:
    shop.follower.die()
    shop.follower.plan()
    wait_until(lambda: shop.active, what="the reader's session", timeout_s=60)
    said = shop.typed("pipeline", "reset", "--yes")
    assert isinstance(said.exception, MillstreamError)
    told = str(said.exception)
    assert "is in use" in told
    assert "top the pipeline" in told
    assert f"SELECT pg_drop_replication_slot('{shop.slot}')" in told
    assert shop.slots == [shop.slot]


# --- doctor and metrics --------------------------------------------------------------------------------------------


def test_doctor_tells_the_bytes_that_a_real_slot_holds_and_that_nobody_reads_it(shop: Shop) -> None:
    shop.database.execute("INSERT INTO orders SELECT generate_series(2, 3000)")
    looked = shop.typed("doctor")
    told = " ".join(looked.output.split())
    assert looked.exit_code == 0, told
    assert f"slot {shop.slot}: nobody reads it" in told
    assert _held(told) > 100_000
    shop.follower.die()
    shop.follower.drain()
    wait_until(lambda: shop.active, what="the reader's session", timeout_s=60)
    told = " ".join(shop.typed("doctor").output.split())
    assert "nobody reads it" not in told
    shop.follower.stop()
    wait_until(lambda: not shop.active, what="the slot's release", timeout_s=60)
    shop.database.execute(f"SELECT pg_drop_replication_slot('{shop.slot}')")
    assert "there is none (yet)" in " ".join(shop.typed("doctor").output.split())


def _held(told: str) -> int:
    return int(told.partition("the server keeps ")[2].partition(" bytes")[0].replace(",", ""))


def test_the_gauges_of_a_slot_are_fed_by_the_watch_that_looks_at_it(shop: Shop) -> None:
    registry, source = CollectorRegistry(), load_pipeline(shop.file).spec.source
    metrics, labels, silent = PipelineMetrics(registry), {"pipeline": "shop", "slot": shop.slot}, []

    def gauge(name: str, **more: str) -> Any:
        return registry.get_sample_value(f"millstream_{name}", {**labels, **more})

    def observer(name: str, /, **facts: Any) -> None:
        metrics(name, **facts)
        silent.append(gauge("slot_unacknowledged_seconds"))

    watch = SlotWatch("shop", lambda: source.slot_status("shop"), observer, tick_s=0.05)
    watch.start()
    try:
        wait_until(lambda: len(silent) > 2, what="some looks", timeout_s=60)
        assert silent[0] == 0 < silent[1] < silent[2], "nobody has acknowledged anything meanwhile"
        assert gauge("slot_wal_status", wal_status="reserved") == 1
        assert gauge("slot_wal_status", wal_status="lost") == 0
        before, looks = gauge("slot_held_bytes"), len(silent)
        shop.database.execute("INSERT INTO orders SELECT generate_series(2, 3000)")
        wait_until(lambda: gauge("slot_held_bytes") > before + 100_000, what="the held bytes", timeout_s=60)
        shop.follower.die()
        assert len(shop.follower.drain()) == 2999
        wait_until(lambda: 0 in silent[looks:], what="the acknowledgement", timeout_s=60)
    finally:
        watch.stop()
