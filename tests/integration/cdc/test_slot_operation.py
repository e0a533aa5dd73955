"""Operator commands and metrics for a real slot: reset, doctor, gauges."""

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
    """A pipeline that has run: its file, its checkpoint and its slot exist, and no reader uses the slot."""

    database: PostgresDatabase
    file: Path
    checkpoint: Path
    slot: str
    follower: Follower

    @property
    def slots(self) -> list[str]:
        rows = self.database.execute("SELECT slot_name FROM pg_replication_slots WHERE database = current_database()")
        return [name for (name,) in rows]

    @property
    def active(self) -> bool:
        [(rows,)] = self.database.execute(f"SELECT active FROM pg_replication_slots WHERE slot_name = '{self.slot}'")
        return bool(rows)

    def typed(self, *arguments: str) -> Result:
        return CliRunner().invoke(build([arguments[0]]), [*arguments, str(self.file)])

    def answered(self, answers: str) -> subprocess.CompletedProcess[str]:
        """``millstream pipeline reset`` in a terminal, because it asks questions only there."""
        ours, theirs = os.openpty()
        try:
            os.write(ours, answers.encode())
            arguments = [sys.executable, "-m", "millstream", "pipeline", "reset", str(self.file)]
            return subprocess.run(arguments, stdin=theirs, capture_output=True, text=True, timeout=120, check=False)
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


def test_reset_keeps_the_slot_after_no(shop: Shop) -> None:
    result = shop.answered("y\nn\n")
    assert result.returncode == 0, result.stderr
    output = " ".join(result.stderr.split())
    assert f"slot {shop.slot} at 127.0.0.1:{shop.database.server.port}/{shop.database.name} remains" in output
    assert "bytes of log" in output
    assert f"SELECT pg_drop_replication_slot('{shop.slot}')" in output, "how to drop it later: the checkpoint is gone"
    assert not shop.checkpoint.exists()
    assert shop.slots == [shop.slot]


def test_reset_drops_the_slot_after_yes(shop: Shop) -> None:
    result = shop.answered("y\ny\n")
    assert result.returncode == 0, result.stderr
    assert not shop.checkpoint.exists()
    assert shop.slots == []


def test_yes_option_drops_slot_and_checkpoint_and_next_start_takes_a_snapshot(shop: Shop) -> None:
    assert shop.typed("pipeline", "reset", "--yes").exit_code == 0
    assert not shop.checkpoint.exists()
    assert shop.slots == []
    follower = Follower(shop.database, shop.checkpoint / "segments", tables="orders", slot=shop.slot)
    assert [event["op"] for event in follower.drain()] == ["r"]
    follower.stop()


def test_reset_does_not_drop_a_slot_in_use_and_says_what_to_do(shop: Shop) -> None:
    shop.follower.die()
    shop.follower.plan()
    wait_until(lambda: shop.active, what="the reader's session", timeout_s=60)
    result = shop.typed("pipeline", "reset", "--yes")
    assert isinstance(result.exception, MillstreamError)
    output = str(result.exception)
    assert "is in use" in output
    assert "top the pipeline" in output
    assert f"SELECT pg_drop_replication_slot('{shop.slot}')" in output
    assert shop.slots == [shop.slot]


# --- doctor and metrics --------------------------------------------------------------------------------------------


def test_doctor_reports_bytes_held_by_an_inactive_slot(shop: Shop) -> None:
    shop.database.execute("INSERT INTO orders SELECT generate_series(2, 3000)")
    result = shop.typed("doctor")
    output = " ".join(result.output.split())
    assert result.exit_code == 0, output
    assert f"slot {shop.slot}: no client reads it" in output
    assert _held(output) > 100_000
    shop.follower.die()
    shop.follower.drain()
    wait_until(lambda: shop.active, what="the reader's session", timeout_s=60)
    output = " ".join(shop.typed("doctor").output.split())
    assert "no client reads it" not in output
    shop.follower.stop()
    wait_until(lambda: not shop.active, what="the slot's release", timeout_s=60)
    shop.database.execute(f"SELECT pg_drop_replication_slot('{shop.slot}')")
    assert "does not exist (yet)" in " ".join(shop.typed("doctor").output.split())


def _held(output: str) -> int:
    return int(output.partition("the server keeps ")[2].partition(" bytes")[0].replace(",", ""))


def test_slot_watch_updates_the_slot_gauges(shop: Shop) -> None:
    registry, source = CollectorRegistry(), load_pipeline(shop.file).spec.source
    metrics, labels, silent = PipelineMetrics(registry), {"pipeline": "shop", "slot": shop.slot}, []

    def gauge(name: str, **more: str) -> Any:
        return registry.get_sample_value(f"millstream_{name}", {**labels, **more})

    def observer(name: str, /, **metadata: Any) -> None:
        metrics(name, **metadata)
        silent.append(gauge("slot_unacknowledged_seconds"))

    watch = SlotWatch("shop", lambda: source.slot_status("shop"), observer, tick_s=0.05)
    watch.start()
    try:
        wait_until(lambda: len(silent) > 2, what="some looks", timeout_s=60)
        assert silent[0] == 0 < silent[1] < silent[2], "nothing was acknowledged"
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
