"""Traces of ``millstream run --tracing`` as an OTLP collector receives them, over process boundaries."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from millstream import Message, Publisher, open_broker
from millstream.observe import disable_tracing, enable_tracing
from millstream.testing import RedisProcess, free_port, wait_until
from tests.support.otlp_receiver import OtlpReceiver, attributes_of

HERE = Path(__file__).parent
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


@pytest.fixture
def start(redis_server: RedisProcess, tmp_path: Path) -> Iterator[Start]:
    shutil.copy(HERE / "traced_worker.py", tmp_path)
    started: list[subprocess.Popen[bytes]] = []

    def start(role: str, **environment: str) -> subprocess.Popen[bytes]:
        options = ["--tracing", "--log-format", "json", "--drain", "2s"]
        command = [sys.executable, "-m", "millstream", "run", "traced_worker:router", "--url", redis_server.url]
        with (tmp_path / f"{role}.log").open("w") as log:
            started.append(
                subprocess.Popen(
                    [*command, *options],
                    cwd=tmp_path,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, "ROLE": role, **environment},
                )
            )
        return started[-1]

    yield start
    for process in started:
        for child in psutil.Process(process.pid).children() if process.poll() is None else []:
            child.kill()
        process.kill()
        process.wait(10)


async def publish(url: str, *messages: Message) -> None:
    async with open_broker(url) as broker, Publisher(broker) as publisher:
        for message in messages:
            await publisher.publish("orders", message)


def test_retry_and_redelivery_after_kill_form_one_trace(
    receiver: OtlpReceiver, start: Start, redis_url: str, tmp_path: Path
) -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(f"{receiver.url}/v1/traces")))
    enable_tracing(provider)
    try:
        asyncio.run(publish(redis_url, Message(b"secret payload", {"card": "secret metadata"})))
    finally:
        disable_tracing()
        provider.shutdown()
    killed = start("killed", **receiver.environment())
    holding = tmp_path / "holding.txt"
    holder_pid = int(wait_until(lambda: holding.exists() and holding.read_text(), timeout_s=60))
    wait_until(lambda: receiver.named("process orders") and receiver.named("retry orders"), timeout_s=60)
    killed.kill()
    psutil.Process(holder_pid).send_signal(signal.SIGKILL)

    start("finishing", **receiver.environment())
    wait_until(lambda: len(receiver.named("process orders")) == 2 and receiver.named("ack orders"), timeout_s=60)
    (send,) = receiver.named("send orders")
    first, last = receiver.named("process orders")
    (retry,) = receiver.named("retry orders")
    (create,) = receiver.named("create outputs")
    assert {span.trace_id for span in (first, last, retry, create)} == {send.trace_id}
    assert first.parent_span_id == last.parent_span_id == retry.parent_span_id == send.span_id
    assert create.parent_span_id == last.span_id
    assert [link.trace_id for link in receiver.named("ack orders")[-1].links] == [send.trace_id]
    counts = [attributes_of(span)["millstream.delivery_count"] for span in (first, last)]
    assert counts[0] == 1
    assert counts[1] >= 3
    assert attributes_of(first)["error.type"] == "ValueError"
    assert attributes_of(send)["messaging.message.id"] == attributes_of(last)["messaging.message.id"]
    assert "secret" not in str(receiver.spans)
    wait_until(lambda: {"messaging.process.duration", "messaging.client.sent.messages"} <= receiver.metric_names)

    lines = [json.loads(line) for line in (tmp_path / "finishing.log").read_text().splitlines()]
    (billing,) = [line for line in lines if line["message"] == "billing"]
    assert (billing["trace_id"], billing["span_id"]) == (last.trace_id.hex(), last.span_id.hex())


def test_exporter_that_is_down_loses_spans_and_no_messages(start: Start, redis_url: str, tmp_path: Path) -> None:
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{free_port()}", "OTEL_BSP_SCHEDULE_DELAY": "20"}
    running = start("finishing", **environment)
    asyncio.run(publish(redis_url, *(Message(b"%d" % number) for number in range(50))))

    async def handled() -> int:
        async with open_broker(redis_url) as broker:
            return await broker.xlen("billed")

    wait_until(lambda: asyncio.run(handled()) == 50, timeout_s=60)
    running.terminate()
    assert running.wait(30) == 0


def test_unknown_exporter_is_refused_at_start(start: Start, tmp_path: Path) -> None:
    assert start("finishing", OTEL_TRACES_EXPORTER="carrier-pigeon").wait(60) == 2
    assert "OTEL_TRACES_EXPORTER" in (tmp_path / "finishing.log").read_text()
