"""Spans of publishers and subscribers on an embedded broker, with the SDK's in-memory exporter."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import DEFAULT_OFF
from opentelemetry.trace import SpanKind, StatusCode

from millstream import Broker, Message, Publisher, Router, open_broker
from millstream.broker import Limits
from millstream.errors import PayloadTooLarge
from millstream.messaging import Backoff, DeadLetters, Rejected, Subscriber
from millstream.observe import disable_tracing, enable_tracing, message_context, pipeline_spans
from millstream.testing import eventually

TRACEPARENT = f"00-{'a' * 32}-{'b' * 16}-01"
UNSAMPLED = f"00-{'a' * 32}-{'b' * 16}-00"


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    enable_tracing(provider)
    yield exporter
    disable_tracing()


def named(exporter: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.name == name]


def ids(context: trace.SpanContext | None) -> tuple[int, int]:
    assert context is not None
    return context.trace_id, context.span_id


def context_of(message: Message) -> trace.SpanContext:
    return trace.get_current_span(message_context(message)).get_span_context()


@asynccontextmanager
async def consuming(
    topic: str,
    handler: Any,
    *,
    codec: str = "flat",
    group: str | None = "g",
    publish_to: str | None = None,
    **more: Any,
) -> AsyncIterator[tuple[Broker, Publisher]]:
    async with open_broker("local://") as broker, Publisher(broker, codec=codec) as publisher:
        router = Router(broker, codec=codec, block_ms=50)
        start = {"group": group, "group_start": "0"} if group else {"start": "0"}
        router.on(topic, publish_to=publish_to, **start, **more)(handler)  # type: ignore[arg-type]
        async with router:
            yield broker, publisher


@pytest.mark.parametrize("codec", ["flat", "json", "watermill", "natricine"])
async def test_codecs_with_metadata_carry_the_trace(spans: InMemorySpanExporter, codec: str) -> None:
    received: list[Message] = []

    async def handle(message: Message) -> None:
        received.append(message)

    async with consuming("orders", handle, codec=codec) as (_, publisher):
        message = Message(b"1", {"tracestate": "ignored=1", "key": "k"})
        await publisher.publish("orders", message)
        await eventually(lambda: named(spans, "process orders"))
    (send,), (process,) = named(spans, "send orders"), named(spans, "process orders")
    assert ids(process.parent) == ids(send.context)
    assert [ids(link.context) for link in process.links] == [ids(send.context)]
    assert (send.kind, process.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert ids(context_of(received[0])) == ids(send.context)
    assert received[0].metadata == {"key": "k", "traceparent": received[0].metadata["traceparent"]}
    assert message.metadata == {"tracestate": "ignored=1", "key": "k"}


async def test_codec_without_metadata_starts_a_new_trace(spans: InMemorySpanExporter) -> None:
    async def handle(message: Message) -> None:
        pass

    async with consuming("orders", handle, codec="raw") as (_, publisher):
        await publisher.publish("orders", Message(b"1"))
        await eventually(lambda: named(spans, "process orders"))
    (process,) = named(spans, "process orders")
    assert process.parent is None
    assert process.links == ()


@pytest.mark.parametrize("group", ["g", None])
async def test_attributes_name_the_message_and_no_content(spans: InMemorySpanExporter, group: str | None) -> None:
    async def handle(message: Message) -> None:
        raise Rejected("secret reason")

    async with consuming("orders", handle, group=group) as (_, publisher):
        await publisher.publish("orders", Message(b"secret payload", {"secret": "secret"}, "uuid-1"))
        await eventually(lambda: named(spans, "process orders"))
    (process,) = named(spans, "process orders")
    assert process.attributes is not None
    assert process.attributes["messaging.message.id"] == "uuid-1"
    assert process.attributes["messaging.destination.name"] == "orders"
    assert process.attributes.get("messaging.consumer.group.name") == group
    assert process.attributes["error.type"] == "millstream.messaging.errors.Rejected"
    assert process.status.status_code is StatusCode.ERROR
    assert not any("secret" in span.to_json() for span in spans.get_finished_spans())


async def test_each_message_of_a_batch_has_a_context_of_its_own(spans: InMemorySpanExporter) -> None:
    async def handle(message: Message) -> None:
        pass

    async with consuming("orders", handle, ordered_by_key=True) as (_, publisher):
        await publisher.publish("orders", Message(b"1", {"key": "a"}), Message(b"2", {"key": "b"}))
        await eventually(lambda: len(named(spans, "process orders")) == 2 and named(spans, "ack orders"))
    (send,), creates = named(spans, "send orders"), named(spans, "create orders")
    assert send.kind is SpanKind.CLIENT
    assert [create.parent for create in creates] == [send.context, send.context]
    parents = {ids(process.parent) for process in named(spans, "process orders")}
    assert parents == {ids(create.context) for create in creates}
    linked = {ids(link.context) for span in named(spans, "receive orders") for link in span.links}
    assert linked == parents


async def test_publish_and_outputs_in_a_handler_continue_its_trace(spans: InMemorySpanExporter) -> None:
    async with consuming("unused", lambda message: None) as (broker, publisher):

        async def handle(message: Message) -> Message:
            await publisher.publish("copies", Message(b"copy", dict(message.metadata)))
            return Message(b"bill", dict(message.metadata))

        subscriber = Subscriber(broker, group="g", group_start="0")
        task = asyncio.create_task(subscriber.consume("orders", handle, publish_to="billed"))
        await publisher.publish("orders", Message(b"1"))
        await eventually(lambda: named(spans, "ack orders"))
        (bill,) = await broker.xrange("billed")
        await subscriber.close()
        await task
    (process,), (create,) = named(spans, "process orders"), named(spans, "create outputs")
    (copy,) = named(spans, "send copies")
    assert copy.parent == process.context
    assert create.parent == process.context
    assert create.context is not None
    assert bill.fields[b"traceparent"].decode().split("-")[2] == trace.format_span_id(create.context.span_id)


async def test_context_set_by_the_application_is_kept_and_linked(spans: InMemorySpanExporter) -> None:
    async with open_broker("local://") as broker, Publisher(broker) as publisher:
        await publisher.publish("orders", Message(b"1", {"traceparent": TRACEPARENT, "tracestate": "a=1"}))
        (entry,) = await broker.xrange("orders")
    assert (entry.fields[b"traceparent"], entry.fields[b"tracestate"]) == (TRACEPARENT.encode(), b"a=1")
    (send,) = named(spans, "send orders")
    assert [trace.format_trace_id(link.context.trace_id) for link in send.links] == ["a" * 32]


async def test_tracestate_is_passed_on(spans: InMemorySpanExporter) -> None:
    async def handle(message: Message) -> Message:
        return Message(b"2")

    async with consuming("orders", handle, publish_to="billed") as (broker, publisher):
        await publisher.publish("orders", Message(b"1", {"traceparent": TRACEPARENT, "tracestate": "b=2,a=1"}))
        await eventually(lambda: named(spans, "ack orders"))
        (bill,) = await broker.xrange("billed")
    assert bill.fields[b"tracestate"] == b"b=2,a=1"


@pytest.mark.parametrize(
    ("parent", "state"),
    [
        ("", ""),
        ("00-" + "0" * 32 + "-" + "b" * 16 + "-01", ""),
        ("ff" + TRACEPARENT[2:], ""),
        (TRACEPARENT.upper(), ""),
        (TRACEPARENT + "\n", ""),
        ("x" * 100_000, "y=" + "z" * 100_000),
        ("\udcff" * 55, "\udcff=1"),
    ],
)
async def test_malformed_context_is_ignored(
    spans: InMemorySpanExporter, caplog: pytest.LogCaptureFixture, parent: str, state: str
) -> None:
    async def handle(message: Message) -> None:
        pass

    async with consuming("orders", handle) as (_, publisher):
        await publisher.publish("orders", Message(b"1", {"traceparent": parent, "tracestate": state}))
        await eventually(lambda: named(spans, "process orders"))
    (process,) = named(spans, "process orders")
    assert process.parent is None
    assert not caplog.records


@pytest.mark.parametrize("state", ["no equals sign", "a=1," * 40 + "b=2", "A=1", "a=\udcff", "a=" + "1" * 600])
def test_malformed_tracestate_is_ignored(state: str, caplog: pytest.LogCaptureFixture) -> None:
    context = context_of(Message(b"", {"traceparent": TRACEPARENT, "tracestate": state}))
    assert context.is_valid
    assert len(context.trace_state) <= 2
    assert not caplog.records


async def test_hostile_names_can_be_exported(spans: InMemorySpanExporter) -> None:
    topic = "\udcff\x1b[31m" + "n" * 1000

    async def handle(message: Message) -> None:
        pass

    async with consuming(topic, handle, group="\udcfe") as (_, publisher):
        await publisher.publish(topic, Message(b"1", uuid="\udcfd"))
        await eventually(lambda: len(spans.get_finished_spans()) >= 4)
    for span in spans.get_finished_spans():
        assert len(span.name) <= 600
        encode_spans([span]).SerializeToString()


async def test_message_that_is_not_sampled_makes_no_spans(spans: InMemorySpanExporter) -> None:
    flags: list[trace.TraceFlags] = []
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("application")

    async def handle(message: Message) -> Message:
        with tracer.start_as_current_span("of the application") as span:
            flags.append(span.get_span_context().trace_flags)
        await publisher.publish("copies", Message(b"copy"))
        return Message(b"bill")

    async with consuming("orders", handle, publish_to="billed") as (broker, publisher):
        await publisher.publish("orders", Message(b"1", {"traceparent": UNSAMPLED}))
        entries = await eventually(lambda: broker.xrange("billed"))
        entries += await broker.xrange("copies")
    assert [entry.fields[b"traceparent"] for entry in entries] == [UNSAMPLED.encode()] * 2
    assert flags == [trace.TraceFlags(0)]
    assert not named(spans, "process orders")
    assert not named(spans, "ack orders")


async def test_sampler_decides_at_the_publish() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(DEFAULT_OFF, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    enable_tracing(provider)
    received: list[Message] = []

    async def handle(message: Message) -> None:
        received.append(message)

    try:
        async with consuming("orders", handle) as (_, publisher):
            await publisher.publish("orders", Message(b"1"), Message(b"2"))
            await publisher.publish("orders", Message(b"3"))
            await eventually(lambda: len(received) == 3)
    finally:
        disable_tracing()
    assert not any(context_of(message).trace_flags.sampled for message in received)
    assert all(context_of(message).is_valid for message in received)
    assert not exporter.get_finished_spans()


class _Broken(SpanProcessor):
    def on_start(self, span: Span, parent_context: Any = None) -> None:
        raise OSError("the span processor is broken")

    def on_end(self, span: ReadableSpan) -> None:
        raise OSError("the span processor is broken")


async def test_broken_span_processor_does_not_affect_messages(caplog: pytest.LogCaptureFixture) -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(_Broken())
    enable_tracing(provider)

    async def handle(message: Message) -> Message:
        return Message(b"bill")

    try:
        async with consuming("orders", handle, publish_to="billed") as (broker, publisher):
            for number in range(20):
                await publisher.publish("orders", Message(b"%d" % number))
            await eventually(lambda: _has_length(broker, "billed", 20))
    finally:
        disable_tracing()
    assert len([record for record in caplog.records if record.name == "millstream.observe.tracing"]) <= 1


async def _has_length(broker: Broker, stream: str, length: int) -> bool:
    return await broker.xlen(stream) == length


async def test_dead_letter_and_its_replay_belong_to_the_trace(spans: InMemorySpanExporter) -> None:
    fails = True

    async def handle(message: Message) -> None:
        if fails:
            raise ValueError("no")

    backoff = Backoff(initial_ms=1, max_ms=1)
    async with consuming("orders", handle, max_deliveries=2, backoff=backoff) as (broker, publisher):
        await publisher.publish("orders", Message(b"1"))
        await eventually(lambda: named(spans, "dead_letter orders"))
        fails = False
        await DeadLetters(broker, "orders").replay()
        await eventually(lambda: named(spans, "ack orders"))
    (send,), (replay,) = named(spans, "send orders"), named(spans, "replay orders")
    (retry,), (dead,) = named(spans, "retry orders"), named(spans, "dead_letter orders")
    assert send.context is not None
    of_trace = [*named(spans, "process orders"), retry, dead]
    assert {span.context.trace_id for span in of_trace if span.context} == {send.context.trace_id}
    assert len(of_trace) == 5
    assert [ids(link.context) for link in replay.links] == [ids(send.context)]
    assert dead.attributes is not None
    assert dead.attributes["error.type"] == "ValueError"


async def test_metrics_follow_the_conventions() -> None:
    reader = InMemoryMetricReader()
    enable_tracing(TracerProvider(shutdown_on_exit=False), MeterProvider([reader], shutdown_on_exit=False))
    done = asyncio.Event()

    async def handle(message: Message) -> Message | None:
        if message.payload == b"bad":
            done.set()
            raise Rejected("no")
        return Message(b"bill")

    try:
        async with consuming("orders", handle, publish_to="billed") as (broker, publisher):
            await publisher.publish("orders", Message(b"1"), Message(b"2"), Message(b"bad"))
            await done.wait()
            await eventually(DeadLetters(broker, "orders").count)
            await eventually(lambda: _has_length(broker, "billed", 2))
        data = reader.get_metrics_data()
    finally:
        disable_tracing()
    assert data is not None
    points = {
        (metric.name, point.attributes["messaging.destination.name"], point.attributes.get("error.type")): point
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
        if point.attributes["messaging.operation.name"] in ("send", "receive", "process")
    }
    rejected = "millstream.messaging.errors.Rejected"
    assert points["messaging.client.sent.messages", "orders", None].value == 3
    assert points["messaging.client.sent.messages", "billed", None].value == 2
    assert points["messaging.client.consumed.messages", "orders", None].value == 3
    assert points["messaging.process.duration", "orders", None].count == 2
    assert points["messaging.process.duration", "orders", rejected].count == 1


async def test_failed_publish_is_an_error(spans: InMemorySpanExporter) -> None:
    async with open_broker("local://", limits=Limits(max_entry_bytes=100)) as broker, Publisher(broker) as publisher:
        with pytest.raises(PayloadTooLarge):
            await publisher.publish("orders", Message(b"1" * 101))
    (send,) = named(spans, "send orders")
    assert send.status.status_code is StatusCode.ERROR


def test_pipeline_batch_contains_its_sinks() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    observe = pipeline_spans(provider)
    observe("pipeline.sink", pipeline="p", sink="redis", batch=7, rows=10, s=0.5)
    observe("pipeline.sink", pipeline="p", sink="late", batch=6, rows=1, s=0.5)
    observe("pipeline.batch", pipeline="p", batch=7, events=10, failed=1, s=2.0)
    sink, batch = exporter.get_finished_spans()
    assert (sink.name, batch.name) == ("sink redis", "batch p")
    assert sink.parent == batch.context
    assert batch.attributes == {
        "millstream.pipeline": "p",
        "millstream.batch_id": 7,
        "millstream.batch.events": 10,
        "millstream.batch.failed_events": 1,
    }
    assert batch.start_time is not None
    assert batch.end_time is not None
    assert batch.end_time - batch.start_time == 2_000_000_000


def test_opentelemetry_is_imported_only_by_the_switch() -> None:
    program = """
import sys
import millstream, millstream.observe, millstream.runner, millstream.runner.worker, millstream.cli.run
from millstream import Publisher, Router, open_broker
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
millstream.observe.enable_tracing()
assert "opentelemetry.trace" in sys.modules and "opentelemetry.sdk.trace" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
