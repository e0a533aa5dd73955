"""Traces and metrics of messages for OpenTelemetry: ``enable_tracing()`` once per process, before anything is consumed.

A span is recorded for each publish, for each delivery that a handler processes, and for retries, dead letters, replays
and batches of pipelines. The context travels as W3C ``traceparent`` and ``tracestate`` in the metadata of a message, so
that retries and redeliveries in other processes belong to the trace of the publish. Names and attributes follow
OpenTelemetry's conventions for messaging. No attribute contains a payload, metadata, or the text of an error.

Errors of the SDK (a sampler, a span processor) are logged and never reach a caller. Exporters run in threads of their
own.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, ParamSpec

from opentelemetry import metrics, trace
from opentelemetry.context import Context, attach, detach
from opentelemetry.trace import (
    INVALID_SPAN,
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
)

from millstream.errors import InvalidArgument
from millstream.messaging import Message, RetryLater, tracing
from millstream.messaging.codecs import codec
from millstream.messaging.handler import Handler, callable_name, mark_needs_thread, needs_thread
from millstream.model import Observer

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.trace import TracerProvider

log = logging.getLogger(__name__)

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
SCOPE: Final = "millstream"
MAX_ATTRIBUTE_CHARS: Final = 256
MAX_TRACESTATE_CHARS: Final = 512
"""What W3C requires systems to pass on. A longer one is dropped: any producer can write metadata."""
MAX_LINKS: Final = 128
MAX_SINKS_PER_BATCH: Final = 64
SHUTDOWN_S: Final = 3.0
"""How long the end of a process waits for an exporter that does not respond."""
_PARENT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_UNSAMPLED: Final = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f][02468ace]").fullmatch
_STATE_MEMBER: Final = re.compile(r"([a-z0-9][a-z0-9_\-*/@]{0,255})=([\x20-\x2b\x2d-\x3c\x3e-\x7e]{1,256})")
_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
"""The boundaries that the conventions for metrics of durations name."""

P = ParamSpec("P")


def enable_tracing(
    tracer_provider: trace.TracerProvider | None = None, meter_provider: metrics.MeterProvider | None = None
) -> None:
    """Records spans and metrics of all publishers and subscribers of this process from now on.

    Configure the SDK first: None means OpenTelemetry's global providers. Subscriptions that run already are not traced.
    Metrics are recorded only if there is an SDK for them.
    """
    tracing.activate(_Tracer(tracer_provider or trace.get_tracer_provider(), _meter(meter_provider)))


def disable_tracing() -> None:
    """Subscriptions that run already are traced until they end."""
    tracing.activate(None)


def message_context(message: Message) -> Context:
    """The context in which the message was published, for spans of your own, such as in an ``async for`` loop:
    ``tracer.start_as_current_span("charge", context=message_context(message))``. Empty if the message has none."""
    parent = _parent_of(message.metadata)
    return Context() if parent is None else trace.set_span_in_context(NonRecordingSpan(parent), Context())


def _meter(provider: metrics.MeterProvider | None) -> metrics.Meter | None:
    provider = provider or metrics.get_meter_provider()
    # Without an SDK the global provider is a proxy that records nothing, and yet costs a call for each message.
    if isinstance(provider, metrics.NoOpMeterProvider) or type(provider).__name__ == "_ProxyMeterProvider":
        return None
    return provider.get_meter(SCOPE)


def _never_raises(function: Callable[P, None]) -> Callable[P, None]:
    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except Exception:  # of OpenTelemetry or an exporter: tracing costs no message its outcome
            _log_failure()

    return guarded


_failure_logged_at = float("-inf")


def _log_failure() -> None:
    """Logs the current exception, at most once a minute."""
    global _failure_logged_at  # noqa: PLW0603 (one log per process)
    now = time.monotonic()
    if now - _failure_logged_at >= 60:
        _failure_logged_at = now
        log.exception("a span could not be recorded; messages are not affected")


# --- context in metadata ----------------------------------------------------------------------------------------------


def _parent_of(metadata: Mapping[str, str]) -> SpanContext | None:
    """The context that the producer wrote; None if it is missing or malformed."""
    header = metadata.get(TRACEPARENT)
    match = _PARENT.fullmatch(header) if isinstance(header, str) else None
    if match is None:
        return None
    flags = TraceFlags(int(match[3], 16))
    return SpanContext(int(match[1], 16), int(match[2], 16), True, flags, _state_of(metadata.get(TRACESTATE)))


def _state_of(header: object) -> TraceState | None:
    """None if it is malformed: the SDK's own parser logs each malformed value, which any producer could repeat."""
    if not isinstance(header, str) or not 0 < len(header) <= MAX_TRACESTATE_CHARS:
        return None
    members = [member.strip(" \t") for member in header.split(",")]
    matches = [_STATE_MEMBER.fullmatch(member) for member in members if member]
    pairs = {match[1]: match[2] for match in matches if match is not None}
    return TraceState(list(pairs.items())) if len(pairs) == len(matches) <= 32 else None


def _headers(context: SpanContext) -> dict[str, str]:
    headers = {TRACEPARENT: f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"}
    if context.trace_state:
        headers[TRACESTATE] = context.trace_state.to_header()
    return headers


def _with_headers(message: Message, headers: Mapping[str, str], copied_from: str | None) -> Message:
    """A copy with the context in its metadata, because a message may be published more than once.

    A context that the application has set stays, unless it was copied with the metadata of the message in process.
    """
    existing = message.metadata.get(TRACEPARENT)
    if existing is not None and existing != copied_from:
        return message
    metadata = {name: value for name, value in message.metadata.items() if name != TRACESTATE}
    return Message(message.payload, {**metadata, **headers}, message.uuid)


_unsampled_message: ContextVar[Message | None] = ContextVar("millstream_unsampled_message", default=None)


class _Unsampled(NonRecordingSpan):
    """The parent of spans while a message is handled that is not sampled.

    There is one object, in one OpenTelemetry context, because a new context for each message would cost more than
    everything else here. Its ids are those of the current message, and are parsed only if some code asks for them.
    """

    def __init__(self) -> None:
        super().__init__(trace.INVALID_SPAN_CONTEXT)

    def get_span_context(self) -> SpanContext:
        message = _unsampled_message.get()
        parent = None if message is None else _parent_of(message.metadata)
        return parent or trace.INVALID_SPAN_CONTEXT

    @property
    def header(self) -> str | None:
        message = _unsampled_message.get()
        return None if message is None else message.metadata.get(TRACEPARENT)


_UNSAMPLED_SPAN: Final = _Unsampled()
_UNSAMPLED_CONTEXT: Final = trace.set_span_in_context(_UNSAMPLED_SPAN, Context())


def _attribute(value: object) -> str:
    """A bounded text that UTF-8 can encode: one lone surrogate would make an exporter drop its whole batch."""
    text = str(value)
    if len(text) > MAX_ATTRIBUTE_CHARS:
        text = text[: MAX_ATTRIBUTE_CHARS - 3] + "..."
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _error_type(error: BaseException) -> str:
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _wall_ns(monotonic_s: float) -> int:
    return time.time_ns() - int((time.monotonic() - monotonic_s) * 1e9)


@functools.lru_cache(maxsize=2048)
def _attributes(operation: str, kind: str, topic: str, group: str | None = None) -> dict[str, Any]:
    """Shared: SDKs copy them."""
    attributes = {
        "messaging.system": "redis",
        "messaging.destination.name": _attribute(topic),
        "messaging.operation.name": operation,
        "messaging.operation.type": kind,
    }
    if group is not None:
        attributes["messaging.consumer.group.name"] = _attribute(group)
    return attributes


class _Instruments:
    """The metrics of the conventions for messaging."""

    def __init__(self, meter: metrics.Meter) -> None:
        def duration(name: str, text: str) -> metrics.Histogram:
            return meter.create_histogram(name, "s", text, explicit_bucket_boundaries_advisory=_BUCKETS)

        self.operation = duration("messaging.client.operation.duration", "Duration of an operation of a client.")
        self.process = duration("messaging.process.duration", "Duration of processing a message.")
        self.sent = meter.create_counter("messaging.client.sent.messages", "{message}", "Messages sent.")
        self.consumed = meter.create_counter("messaging.client.consumed.messages", "{message}", "Messages delivered.")


# --- the tracer -------------------------------------------------------------------------------------------------------


class _Tracer:
    """Implements ``millstream.messaging.tracing.Tracer``."""

    def __init__(self, provider: trace.TracerProvider, meter: metrics.Meter | None) -> None:
        self.tracer = provider.get_tracer(SCOPE)
        self.instruments = None if meter is None else _Instruments(meter)
        # A sampler that follows its parent drops a message whose publish was not sampled. Then the SDK is not called.
        sampler = getattr(provider, "sampler", None)
        description = sampler.get_description() if sampler is not None else ""
        parents = ("remoteParentNotSampled:AlwaysOffSampler", "localParentNotSampled:AlwaysOffSampler")
        self.drops_unsampled = description.startswith("ParentBased{") and all(
            parent in description for parent in parents
        )

    def start(
        self,
        name: str,
        kind: SpanKind,
        attributes: Mapping[str, Any],
        context: Context | None = None,
        links: Sequence[Link] | None = None,
        start_ns: int | None = None,
    ) -> Span:
        try:
            return self.tracer.start_span(
                _attribute(name),
                context,
                kind,
                attributes,
                links,
                start_ns,
                record_exception=False,
                set_status_on_exception=False,
            )
        except Exception:  # of OpenTelemetry or an exporter: tracing costs no message its outcome
            _log_failure()
            return INVALID_SPAN

    @staticmethod
    @_never_raises
    def end(span: Span, error: BaseException | None = None, *, is_failure: bool = True) -> None:
        if error is not None and span.is_recording():
            span.set_attribute("error.type", _error_type(error))
            if is_failure:
                span.set_status(Status(StatusCode.ERROR))
        span.end()

    # --- publishers ---------------------------------------------------------------------------------------------------

    def publishing(self, topic: str, messages: Sequence[Message]) -> AbstractContextManager[Sequence[Message]]:
        return _Publishing(self, topic, messages)

    @_never_raises
    def outputs_stored(self, topic: str, count: int) -> None:
        if self.instruments is not None:
            self.instruments.sent.add(count, _attributes("send", "send", topic))

    # --- handlers -----------------------------------------------------------------------------------------------------

    def traced_handler(self, handler: Handler, topic: str, group: str | None, *, has_outputs: bool) -> Handler:
        attributes = _attributes("process", "process", topic, group)
        name = f"process {topic}"
        measured = None if self.instruments is None else self.instruments.process
        drops_unsampled = self.drops_unsampled

        async def recorded(message: Message) -> Any:
            span = self._process(name, attributes, message)
            token = attach(trace.set_span_in_context(span))
            began = time.perf_counter()
            failed: BaseException | None = None
            try:
                output = await handler(message)
                return self._outputs(output, span, message, topic) if has_outputs else output
            except BaseException as error:  # recorded in the span
                failed = error
                raise
            finally:
                detach(token)
                if measured is not None:
                    self._measure(measured, time.perf_counter() - began, attributes, failed)
                self.end(span, failed, is_failure=not isinstance(failed, RetryLater))

        async def handle(message: Message) -> Any:
            header = message.metadata.get(TRACEPARENT)
            # The hot path of a service that samples few traces: the SDK is not called, only the context is set.
            if not drops_unsampled or type(header) is not str or not _UNSAMPLED(header):
                return await recorded(message)
            of_message, token = _unsampled_message.set(message), attach(_UNSAMPLED_CONTEXT)
            began = 0.0 if measured is None else time.perf_counter()
            failed: BaseException | None = None
            try:
                output = await handler(message)
                return self._outputs(output, _UNSAMPLED_SPAN, message, topic) if has_outputs else output
            except BaseException as error:  # recorded in the span
                failed = error
                raise
            finally:
                detach(token)
                _unsampled_message.reset(of_message)
                if measured is not None:
                    self._measure(measured, time.perf_counter() - began, attributes, failed)

        handle.__name__ = callable_name(handler)
        return mark_needs_thread(handle) if needs_thread(handler) else handle

    def _process(self, name: str, attributes: Mapping[str, Any], message: Message) -> Span:
        parent = _parent_of(message.metadata)
        # Not the current context: the task that runs handlers may have been started inside of an unrelated span.
        context = Context() if parent is None else trace.set_span_in_context(NonRecordingSpan(parent), Context())
        # The conventions require a link; the parent makes one trace of it in every tool.
        links = None if parent is None or not parent.trace_flags.sampled else [Link(parent)]
        span = self.start(name, SpanKind.CONSUMER, attributes, context, links)
        if span.is_recording():
            span.set_attributes(_message_attributes(message))
        return span

    def _outputs(self, output: Any, span: Span, message: Message, topic: str) -> Any:
        """The outputs, in the context of a span that creates them. A result that is no message is refused later."""
        outputs = [output] if isinstance(output, Message) else output
        if not isinstance(outputs, Sequence) or not all(isinstance(item, Message) for item in outputs) or not outputs:
            return output
        create = span
        if span.is_recording():
            attributes = {**_attributes("create", "create", topic), "messaging.batch.message_count": len(outputs)}
            del attributes["messaging.destination.name"]  # the destination is known when the outputs are stored
            create = self.start(
                "create outputs", SpanKind.PRODUCER, attributes, trace.set_span_in_context(span, Context())
            )
            self.end(create)
        context = create.get_span_context()
        if not context.is_valid:
            return output
        headers, copied_from = _headers(context), message.metadata.get(TRACEPARENT)
        return [_with_headers(item, headers, copied_from) for item in outputs]

    # --- reads and outcomes -------------------------------------------------------------------------------------------

    @_never_raises
    def received(self, topic: str, group: str, messages: Collection[Message], began_s: float) -> None:
        attributes = _attributes("receive", "receive", topic, group)
        if self.instruments is not None:
            self.instruments.consumed.add(len(messages), attributes)
        self._batch("receive", attributes, topic, messages, began_s)

    @_never_raises
    def acked(self, topic: str, group: str, messages: Collection[Message], began_s: float) -> None:
        self._batch("ack", _attributes("ack", "settle", topic, group), topic, messages, began_s)

    def _batch(
        self, operation: str, attributes: dict[str, Any], topic: str, messages: Collection[Message], began_s: float
    ) -> None:
        """One span for the batch, in a trace of its own, with links to the messages that are sampled."""
        if self.instruments is not None:
            self._measure(self.instruments.operation, time.monotonic() - began_s, attributes, None)
        links = _links(message.metadata for message in messages)
        if links:
            attributes = {**attributes, "messaging.batch.message_count": len(messages)}
            start_ns = _wall_ns(began_s)
            self.end(self.start(f"{operation} {topic}", SpanKind.CLIENT, attributes, Context(), links, start_ns))

    @_never_raises
    def retried(self, topic: str, group: str, messages: Collection[Message], began_s: float) -> None:
        for message in messages:
            self._settled("retry", topic, group, message, began_s)

    @_never_raises
    def dead_lettered(self, topic: str, group: str, message: Message, error_type: str, began_s: float) -> None:
        self._settled("dead_letter", topic, group, message, began_s, error_type)

    def _settled(
        self, operation: str, topic: str, group: str, message: Message, began_s: float, error_type: str = ""
    ) -> None:
        """A span in the trace of the message."""
        attributes = _attributes(operation, "settle", topic, group)
        if self.instruments is not None:
            self._measure(self.instruments.operation, time.monotonic() - began_s, attributes, None)
        context, start_ns = message_context(message), _wall_ns(began_s)
        span = self.start(f"{operation} {topic}", SpanKind.CLIENT, attributes, context, None, start_ns)
        if span.is_recording():
            span.set_attributes(_message_attributes(message))
            if error_type:
                span.set_attribute("error.type", _attribute(error_type))
        self.end(span)

    @_never_raises
    def replayed(self, topic: str, entries: Sequence[dict[bytes, bytes]], began_s: float) -> None:
        attributes = _attributes("replay", "send", topic)
        if self.instruments is not None:
            self.instruments.sent.add(len(entries), attributes)
            self._measure(self.instruments.operation, time.monotonic() - began_s, attributes, None)
        links = _links(_metadata_of(entries))
        attributes = {**attributes, "messaging.batch.message_count": len(entries)}
        self.end(self.start(f"replay {topic}", SpanKind.CLIENT, attributes, None, links, _wall_ns(began_s)))

    def current_ids(self) -> tuple[str, str] | None:
        context = trace.get_current_span().get_span_context()
        if not context.is_valid:
            return None
        return trace.format_trace_id(context.trace_id), trace.format_span_id(context.span_id)

    @staticmethod
    @_never_raises
    def _measure(
        histogram: metrics.Histogram, seconds: float, attributes: Mapping[str, Any], error: BaseException | None
    ) -> None:
        if error is not None:
            attributes = {**attributes, "error.type": _error_type(error)}
        histogram.record(seconds, attributes)


def _message_attributes(message: Message) -> dict[str, Any]:
    attributes: dict[str, Any] = {"messaging.message.id": _attribute(message.uuid)}
    if message.id is not None:
        attributes["millstream.entry_id"] = str(message.id)
        attributes["millstream.delivery_count"] = message.times_delivered
    return attributes


def _links(metadata: Iterable[Mapping[str, str]]) -> list[Link]:
    links: list[Link] = []
    for headers in metadata:
        header = headers.get(TRACEPARENT)
        if header is None or (len(header) == 55 and header[54] in "02468ace"):
            continue  # not sampled, which is the usual case: it must cost little
        parent = _parent_of(headers)
        if parent is not None and parent.trace_flags.sampled:
            links.append(Link(parent))
            if len(links) == MAX_LINKS:
                break
    return links


def _metadata_of(entries: Iterable[dict[bytes, bytes]]) -> Iterable[Mapping[str, str]]:
    """The metadata of entries of any of our codecs, which ``flat`` can read."""
    decode = codec("flat").decode
    for fields in entries:
        try:
            yield decode(fields).metadata
        except Exception:  # noqa: S112 (a codec of the user: its dead letters have no link)
            continue


class _Publishing(AbstractContextManager[Sequence[Message]]):
    """The span of one call of ``publish``.

    One message carries the context of that span. Each of several messages gets a span of its own inside of it.
    """

    def __init__(self, tracer: _Tracer, topic: str, messages: Sequence[Message]) -> None:
        self._tracer = tracer
        self._topic = topic
        self._messages = messages
        self._span: Span = INVALID_SPAN
        self._began = time.perf_counter()

    def __enter__(self) -> Sequence[Message]:
        try:
            return self._inject() if self._messages else self._messages
        except Exception:  # of OpenTelemetry or an exporter: tracing costs no message its outcome
            _log_failure()
            return self._messages

    def _inject(self) -> Sequence[Message]:
        tracer, topic, messages = self._tracer, self._topic, self._messages
        current = trace.get_current_span()
        copied_from = _header_of_parent(current)
        if tracer.drops_unsampled and not current.is_recording():
            context = current.get_span_context()
            if context.is_valid and not context.trace_flags.sampled:
                return [_with_headers(message, _headers(context), copied_from) for message in messages]
        links = _links(msg.metadata for msg in messages if msg.metadata.get(TRACEPARENT) != copied_from)
        attributes = _attributes("send", "send", topic)
        if len(messages) == 1:
            attributes = {**attributes, "messaging.message.id": _attribute(messages[0].uuid)}
        else:
            attributes = {**attributes, "messaging.batch.message_count": len(messages)}
        kind = SpanKind.PRODUCER if len(messages) == 1 else SpanKind.CLIENT
        self._span = span = tracer.start(f"send {topic}", kind, attributes, None, links)
        context = span.get_span_context()
        if not context.is_valid:
            return messages
        if len(messages) == 1 or not span.is_recording():
            return [_with_headers(message, _headers(context), copied_from) for message in messages]
        return [self._created(message, copied_from) for message in messages]

    def _created(self, message: Message, copied_from: str | None) -> Message:
        if message.metadata.get(TRACEPARENT) not in (None, copied_from):
            return message
        attributes = {
            **_attributes("create", "create", self._topic),
            "messaging.message.id": _attribute(message.uuid),
        }
        inside = trace.set_span_in_context(self._span, Context())
        create = self._tracer.start(f"create {self._topic}", SpanKind.PRODUCER, attributes, inside)
        self._tracer.end(create)
        return _with_headers(message, _headers(create.get_span_context()), copied_from)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if (instruments := self._tracer.instruments) is not None:
            attributes = _attributes("send", "send", self._topic)
            self._tracer._measure(instruments.operation, time.perf_counter() - self._began, attributes, error)
            if error is None:
                self._tracer.outputs_stored(self._topic, len(self._messages))
        self._tracer.end(self._span, error)


def _header_of_parent(current: Span) -> str | None:
    """The context of the message whose handler is running: metadata that was copied from it contains this value."""
    if isinstance(current, _Unsampled):
        return current.header
    parent = getattr(current, "parent", None)
    return _headers(parent)[TRACEPARENT] if isinstance(parent, SpanContext) and parent.is_remote else None


# --- pipelines --------------------------------------------------------------------------------------------------------


def pipeline_spans(tracer_provider: trace.TracerProvider | None = None) -> Observer:
    """An observer that records a span for each batch of a pipeline, with a span for each sink inside of it."""
    tracer = _Tracer(tracer_provider or trace.get_tracer_provider(), None)
    sinks: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    lock = threading.Lock()

    @_never_raises
    def observe(name: str, /, **values: Any) -> None:
        pipeline = str(values.get("pipeline", ""))
        if name == "pipeline.sink":
            with lock:
                waiting = sinks.setdefault(pipeline, [])
                if len(waiting) < MAX_SINKS_PER_BATCH:
                    waiting.append((time.time_ns(), values))
        elif name == "pipeline.batch":
            with lock:
                of_batch = [sink for sink in sinks.pop(pipeline, []) if sink[1].get("batch") == values.get("batch")]
            _batch_span(tracer, pipeline, values, of_batch)

    return observe


def _batch_span(
    tracer: _Tracer, pipeline: str, values: Mapping[str, Any], sinks: Sequence[tuple[int, Mapping[str, Any]]]
) -> None:
    end_ns = time.time_ns()
    attributes = {
        "millstream.pipeline": _attribute(pipeline),
        "millstream.batch_id": int(values.get("batch", 0)),
        "millstream.batch.events": int(values.get("events", 0)),
        "millstream.batch.failed_events": int(values.get("failed", 0)),
    }
    start_ns = end_ns - int(values.get("s", 0) * 1e9)
    batch = tracer.start(f"batch {pipeline}", SpanKind.INTERNAL, attributes, Context(), None, start_ns)
    for sink_end_ns, of_sink in sinks:
        sink = str(of_sink.get("sink", ""))
        inside = trace.set_span_in_context(batch, Context())
        sink_start_ns = max(start_ns, sink_end_ns - int((of_sink.get("s") or 0) * 1e9))
        sink_attributes = {"millstream.sink": _attribute(sink), "millstream.batch.rows": int(of_sink.get("rows") or 0)}
        span = tracer.start(f"sink {sink}", SpanKind.PRODUCER, sink_attributes, inside, None, sink_start_ns)
        span.end(sink_end_ns)
    batch.end(end_ns)


# --- the SDK, from its environment variables --------------------------------------------------------------------------


def start_sdk() -> Callable[[], None]:
    """Configures the SDK from ``OTEL_*`` variables and enables tracing. Returns a function that ends both.

    Providers that the program (or ``opentelemetry-instrument``) has set are used as they are. The returned function
    waits at most ``SHUTDOWN_S`` for the last export. Raises InvalidArgument for a value that is not supported.
    """
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return lambda: None
    shutdowns = [stop for stop in (_set_tracer_provider(), _set_meter_provider()) if stop is not None]
    enable_tracing()

    def stop() -> None:
        disable_tracing()
        threads = [threading.Thread(target=shutdown, name="millstream otel", daemon=True) for shutdown in shutdowns]
        for thread in threads:
            thread.start()
        until = time.monotonic() + SHUTDOWN_S
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    return stop


def _exporter(signal: str) -> str:
    name = f"OTEL_{signal}_EXPORTER"
    exporter = os.environ.get(name, "").strip() or "otlp"
    if exporter not in ("otlp", "console", "none"):
        raise InvalidArgument(name, exporter, "otlp, console or none")
    for variable in (f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if exporter == "otlp" and (protocol := os.environ.get(variable, "").strip()):
            if protocol != "http/protobuf":
                raise InvalidArgument(variable, protocol, "http/protobuf")
            break
    return exporter


def _set_tracer_provider() -> Callable[[], None] | None:
    exporter = _exporter("TRACES")
    if exporter == "none" or type(trace.get_tracer_provider()).__name__ != "ProxyTracerProvider":
        return None
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter

    spans: SpanExporter
    if exporter == "console":
        spans = ConsoleSpanExporter()
    else:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        spans = OTLPSpanExporter()
    provider: TracerProvider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(spans))
    trace.set_tracer_provider(provider)
    return provider.shutdown


def _set_meter_provider() -> Callable[[], None] | None:
    exporter = _exporter("METRICS")
    if exporter == "none" or type(metrics.get_meter_provider()).__name__ != "_ProxyMeterProvider":
        return None
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, MetricExporter, PeriodicExportingMetricReader

    values: MetricExporter
    if exporter == "console":
        values = ConsoleMetricExporter()
    else:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

        values = OTLPMetricExporter()
    provider: MeterProvider = MeterProvider([PeriodicExportingMetricReader(values)], shutdown_on_exit=False)
    metrics.set_meter_provider(provider)
    return provider.shutdown
