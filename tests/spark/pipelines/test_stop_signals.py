"""SIGTERM and SIGINT for ``millstream pipeline run`` while a sink hangs, and while Spark starts."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from millstream.testing import RedisProcess, wait_until
from support.pipeline_process import PipelineProcess

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]

SPEC = """
apiVersion: millstream/v1
kind: Pipeline
metadata: {name: shop}
spec:
  source: {type: generator, config: {rows: 50}}
  sinks:
    - {type: redis, config: {id: good, uri: "GOOD", stream: out}}
    - {type: redis, config: {id: hangs, uri: "HANGS", stream: out, required: REQUIRED, send_timeout: 10m,
                             batch_timeout: 10m, connect_timeout: 10m}}
  dlq: {enabled: false}
  checkpoint: {path: "CHECKPOINT"}
  spark: {master: "local[2]"}
"""


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield listener.getsockname()[1]


def started(directory: Path, good: str, silent_port: int, *words: str, required: bool) -> PipelineProcess:
    text = SPEC.replace("GOOD", good).replace("HANGS", f"redis://:c4nary@127.0.0.1:{silent_port}")
    text = text.replace("REQUIRED", str(required).lower()).replace("CHECKPOINT", str(directory / "checkpoint"))
    (directory / "shop.yaml").write_text(text)
    return PipelineProcess(directory / "shop.yaml", *words, TMPDIR=str(directory))


@pytest.mark.parametrize("required", [True, False])
def test_stop_is_bounded_while_a_sink_hangs(
    tmp_path: Path, redis_server: RedisProcess, silent_port: int, required: bool
) -> None:
    client = redis.Redis(port=redis_server.port)
    run = started(tmp_path, redis_server.url, silent_port, "--stop-timeout", "2", required=required)
    try:
        wait_until(lambda: run.ended() or client.xlen("out") == 50, what="the other sink's rows", timeout_s=120)
        run.must_run()
        if not required:  # its batch is in the queue before the batch is committed
            committed = tmp_path / "checkpoint" / "spark" / "commits" / "0"
            wait_until(lambda: run.ended() or committed.exists(), what="the first batch to be committed", timeout_s=120)
            run.must_run()
        run.process.send_signal(signal.SIGTERM)
        assert run.process.wait(120) == 0, run.last_words()
        assert "shop: stopped" in run.last_words()
        assert ("replayed" if required else "stays queued") in run.last_words()
    finally:
        run.kill()


def test_second_signal_ends_the_process_at_once(tmp_path: Path, redis_server: RedisProcess, silent_port: int) -> None:
    client = redis.Redis(port=redis_server.port)
    run = started(tmp_path, redis_server.url, silent_port, "--stop-timeout", "3600", required=True)
    try:
        wait_until(lambda: run.ended() or client.xlen("out") == 50, what="the other sink's rows", timeout_s=120)
        run.must_run()
        run.process.send_signal(signal.SIGINT)
        run.process.send_signal(signal.SIGTERM)
        # The two signals may be handled in either order.
        assert run.process.wait(60) in (128 + signal.SIGTERM, 128 + signal.SIGINT), run.last_words()
        assert "second signal" in run.last_words()
        assert list(tmp_path.glob("millstream-secrets-*")) == [], "no file with a password stays behind"
        assert not (tmp_path / "checkpoint" / "control.json").exists()
    finally:
        run.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_while_spark_starts_ends_in_one_line(
    tmp_path: Path, redis_server: RedisProcess, silent_port: int, number: signal.Signals
) -> None:
    run = started(tmp_path, redis_server.url, silent_port, required=False)
    try:
        wait_until(lambda: run.ended() or "starting Spark" in run.last_words(), what="Spark to start", timeout_s=60)
        run.must_run()
        run.process.send_signal(number)
        assert run.process.wait(60) == 128 + number, run.last_words()
        after = run.last_words().split("starting Spark", 1)[1].splitlines()[1:]
        # The optional sink that does not answer may be reported before or after the signal.
        assert len([line for line in after if "sink hangs" not in line]) == 1, after
        assert "Traceback" not in run.last_words()
    finally:
        run.kill()
