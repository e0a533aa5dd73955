"""Unread entries that a hard limit drops behind an optional sink are counted, although no Spark task writes there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prometheus_client import CollectorRegistry

from millstream import open_blocking_broker
from millstream.broker.scripts import retention
from millstream.observe.pipelines import PipelineMetrics
from millstream.pipelines.plan import make_plan
from millstream.pipelines.run_context import RunContext
from millstream.pipelines.sink_queue import Deliverer, SinkQueue
from millstream.pipelines.spec.pipeline import Pipeline
from millstream.storage import open_storage
from millstream.testing import RedisProcess, wait_until


@pytest.fixture
def server() -> Iterator[RedisProcess]:
    with RedisProcess() as process:
        yield process


def queued(first: int) -> Any:
    """A batch of a hundred rows as the sink queue stores them: a sink's own columns, in Parquet."""

    def write(path: str) -> int:
        Path(path).mkdir(parents=True)
        numbers = range(first, first + 100)
        rows = pa.table({"event": [f'{{"n":{n}}}' for n in numbers], "id": [str(n) for n in numbers]})
        pq.write_table(rows, f"{path}/part-0.parquet")
        (Path(path) / "_SUCCESS").touch()
        return 100

    return write


def test_unread_entries_dropped_behind_a_sink_queue_are_reported_and_counted(
    server: RedisProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.pipelines.sink_queue.activate", lambda session: None)  # this sink needs no Spark
    capped = {"id": "copy", "uri": server.url, "stream": "copies", "required": False, "maxlen": 100}
    spec = {
        "source": {"type": "generator", "config": {"rows": 1}},
        "sinks": [{"type": "console", "config": {"id": "main"}}, {"type": "redis", "config": capped}],
        "checkpoint": {"path": str(tmp_path / "checkpoint")},
    }
    head = {"apiVersion": "millstream/v1", "kind": "Pipeline", "metadata": {"name": "orders"}}
    plan = make_plan(Pipeline.model_validate({**head, "spec": spec}))
    with open_blocking_broker(server.url) as broker:
        broker.create_group("copies", "slow", start="0")
    events: list[tuple[str, dict[str, Any]]] = []
    context = RunContext("app", observer=lambda name, **values: events.append((name, values)))
    queue = SinkQueue(open_storage(tmp_path / "queue"), 1 << 20)
    for batch in range(3):
        assert queue.put(batch, queued(100 * batch))

    session: Any = None
    deliverer = Deliverer(session, plan, plan.pipeline.spec.sinks[1], queue, context)
    deliverer.start()
    try:
        wait_until(lambda: queue.count() == 0, what="all batches to be delivered", timeout_s=60)
    finally:
        deliverer.stop()

    registry = CollectorRegistry()
    metrics = PipelineMetrics(registry)
    for name, values in events:
        metrics(name, **values)
    counted = registry.get_sample_value("millstream_sink_capped_total", {"pipeline": "orders", "sink": "copy"})
    assert [values["dropped"] for name, values in events if name == "pipeline.sink"] == [0, 100, 100]
    assert counted == 200
    with open_blocking_broker(server.url) as broker:
        assert broker.xlen("copies") == 100
        assert broker.run(retention.losses, "copies") == {"slow": 200}
