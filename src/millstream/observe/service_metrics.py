"""Metrics from the observer events of brokers, messaging and assignment: a table, and the observer that applies it.

The text of an error is never a label: it may contain data, and the number of different texts is not bounded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from millstream.observe.metrics import LATENCY_BUCKETS, MAX_SERIES, Series

log = logging.getLogger("millstream.observe")

READ = ("topic", "group", "consumer")
GROUP = ("stream", "group")
MEMBER = ("service", "member")
PER_CONSUMER = frozenset({"consumer", "member"})
"""Labels that are added only with ``per_consumer``: each process adds a value."""


class Count(NamedTuple):
    """A counter that grows by the field ``by`` of the event, or by one."""

    metric: str
    text: str
    labels: tuple[str, ...] = ()
    by: str | None = None


class Level(NamedTuple):
    """A gauge that is set to the field ``to`` of the event."""

    metric: str
    text: str
    labels: tuple[str, ...]
    to: str


class Time(NamedTuple):
    """A histogram of the field ``of`` of the event, in seconds."""

    metric: str
    text: str
    labels: tuple[str, ...]
    of: str = "seconds"


Meaning = Count | Level | Time

HANDLER = ("handler", "topic", "group")

MEANINGS: Mapping[str, tuple[Meaning, ...]] = {
    "broker.retry": (Count("broker_retries_total", "Calls to a server that were tried again."),),
    "broker.dropped_undelivered": (
        Count(
            "broker_lost_undelivered_total",
            "Unread entries that hard_max_stream_len dropped.",
            GROUP,
            "undelivered",
        ),
        Count("broker_lost_unacked_total", "Pending entries that hard_max_stream_len dropped.", GROUP, "unacked"),
    ),
    "broker.trim_failed": (Count("broker_trim_failures_total", "Trims after an add that failed.", ("stream",)),),
    "broker.listener_lost": (Count("broker_listener_losses_total", "Pub/sub subscriptions that were interrupted."),),
    "broker.listener_overflow": (
        Count("broker_notifications_dropped_total", "Pub/sub messages that a listener was too slow for.", by="dropped"),
    ),
    # --- publishing
    "messaging.published": (
        Count("messages_published_total", "Messages stored.", ("topic",), "messages"),
        Count("messages_published_bytes_total", "Bytes of messages stored.", ("topic",), "bytes"),
        Time("publish_seconds", "Time to store a batch, tries included.", ("topic",)),
    ),
    "messaging.published_unique": (
        Count("messages_published_total", "Messages stored.", ("topic",), "messages"),
        Count("messages_deduplicated_total", "Messages whose key was published before.", ("topic",), "skipped"),
    ),
    "messaging.outputs_published": (Count("messages_published_total", "Messages stored.", ("topic",), "messages"),),
    "messaging.published_later": (
        Count("messages_delayed_total", "Messages stored to be published later.", ("topic",), "messages"),
    ),
    "messaging.publish_retried": (Count("publish_retries_total", "Batches that were tried again.", ("topic",)),),
    "messaging.outage_began": (Count("outages_total", "Times that the broker could not be reached.", ("what",)),),
    "messaging.outage_ended": (Count("outage_seconds_total", "Seconds without the broker.", ("what",), "seconds"),),
    "messaging.publish_failed": (
        Count("publish_failures_total", "Messages that could not be published.", ("topic", "error_type"), "messages"),
    ),
    # --- subscribing
    "messaging.subscribed": (Count("subscriptions_total", "Times that reading a topic began.", READ),),
    "messaging.received": (Count("messages_received_total", "Entries that were read.", READ, "entries"),),
    "messaging.claimed": (
        Count("messages_claimed_total", "Entries claimed from consumers without heartbeats.", READ, "entries"),
    ),
    "messaging.handled": (
        Time("handler_seconds", "Time that a handler took.", HANDLER),
        Count("handler_calls_total", "Calls of a handler, by error: empty where it succeeded.", (*HANDLER, "error")),
        Count("handler_outputs_total", "Messages that a handler returned.", HANDLER, "outputs"),
    ),
    "messaging.handler_failed": (
        Count("messages_failed_total", "Messages whose handler failed.", (*READ, "error_type")),
    ),
    "messaging.acked": (Count("messages_acked_total", "Messages acknowledged.", READ, "entries"),),
    "messaging.retried": (Count("messages_retried_total", "Messages that will be delivered again.", READ, "entries"),),
    "messaging.dead_lettered": (Count("messages_buried_total", "Messages moved to the dead-letter stream.", READ),),
    "messaging.undecodable": (Count("messages_undecodable_total", "Entries that no codec could read.", READ),),
    "messaging.lost": (
        Count("messages_lost_to_others_total", "Entries claimed by another consumer while in flight.", READ, "entries"),
    ),
    "messaging.hold_expired": (
        Count("messages_hold_expired_total", "Messages without an outcome after max_hold_ms.", READ, "entries"),
    ),
    "messaging.stuck": (
        Count(
            "subscriptions_stuck_total",
            "Times that messages without an outcome used all capacity of a topic.",
            READ,
        ),
    ),
    "messaging.illegal_transition": (
        Count("illegal_transitions_total", "Entries dropped because of a bug in the consumer; delivered again.", READ),
    ),
    "messaging.ack_refused": (
        Count(
            "acks_refused_total",
            "Acknowledgements of entries that were claimed by then, or acknowledged by an attempt without a reply.",
            READ,
            "entries",
        ),
    ),
    "messaging.consumer_shared": (
        Count("consumer_names_shared_total", "Times that another process used the same consumer name.", READ),
    ),
    "messaging.entries_gone": (
        Count("pending_entries_gone_total", "Pending entries that were deleted or trimmed.", READ, "entries"),
    ),
    "messaging.read_failed": (Count("read_errors_total", "Reads that failed and are tried again.", READ),),
    "messaging.reader_stalled": (Count("reader_stalls_total", "Reads without a reply, which were interrupted.", READ),),
    "messaging.settle_retried": (Count("settle_retries_total", "Outcomes that were sent again after an error.", READ),),
    "messaging.settle_failed": (
        Count("settle_failures_total", "Messages whose outcome could not be stored.", READ, "entries"),
    ),
    "messaging.keeping_failed": (Count("keeping_errors_total", "Heartbeats or sweeps that failed.", READ),),
    "messaging.part_restarted": (
        Count("part_restarts_total", "Parts restarted after an unexpected error.", (*READ, "part")),
    ),
    "messaging.group_restored": (Count("groups_restored_total", "Missing groups that were created again.", READ),),
    "messaging.consumer_retired": (
        Count("consumers_retired_total", "Idle consumers without pending entries that were removed.", READ),
    ),
    "messaging.subscription_failed": (
        Count("subscription_failures_total", "Subscriptions that ended with an error.", (*READ, "error_type")),
    ),
    "messaging.route_failed": (
        Count("route_failures_total", "Handlers whose subscription ended and is restarted.", ("handler", "topic")),
    ),
    # --- retention
    "messaging.trimmed": (
        Count("retention_dropped_total", "Entries that a policy deleted.", ("stream",), "dropped"),
        Level("retention_stream_length", "Entries left after the last sweep.", ("stream",), "length"),
    ),
    "messaging.dropped_undelivered": (
        Count("retention_lost_undelivered_total", "Unread entries that a hard cap dropped.", GROUP, "undelivered"),
        Count("retention_lost_unacked_total", "Pending entries that a hard cap dropped.", GROUP, "unacked"),
    ),
    "messaging.held_back": (
        Level("retention_held_back_entries", "Entries kept for a group when last swept.", GROUP, "entries"),
    ),
    "messaging.retention_failed": (Count("retention_failures_total", "Sweeps of a stream that failed.", ("stream",)),),
    "messaging.retention_conflict": (
        Count("retention_conflicts_total", "Passes that another worker's policy prevented.", ("stream",)),
    ),
    "messaging.large_stream": (
        Level("unbounded_stream_length", "Entries of a large stream without a policy.", ("stream",), "length"),
    ),
    # --- assignment
    "assignment.claimed": (
        Count("assignment_claim_attempts_total", "Leases that were requested.", MEMBER, "tried"),
        Count("assignment_leases_acquired_total", "Leases that were granted.", MEMBER, "won"),
        Time("assignment_claim_duration_seconds", "Time to take a batch of leases.", MEMBER),
    ),
    "assignment.taken": (),
    "assignment.renewed": (
        Count("assignment_leases_extended_total", "Leases renewed.", MEMBER, "leases"),
        Time("assignment_extension_duration_seconds", "Time to renew all leases of a member.", MEMBER),
    ),
    "assignment.released": (),
    "assignment.handed_over": (
        Count("assignment_streams_handed_over_total", "Streams released to balance the load.", MEMBER, "streams"),
    ),
    "assignment.disowned": (
        Count("assignment_streams_disowned_total", "Streams that another member owns by now.", MEMBER),
    ),
    "assignment.unsubscribed": (),
    "assignment.finished": (Count("assignment_streams_finished_total", "Streams whose work is done.", MEMBER),),
    "assignment.malformed": (
        Count("assignment_malformed_total", "Malformed announcements, moved to the dead-letter stream.", MEMBER),
    ),
    "assignment.unanswered": (Count("assignment_unanswered_total", "Streams whose server refused an answer.", MEMBER),),
    "assignment.step_failed": (
        Count("assignment_step_failures_total", "Heartbeats or sweeps that failed.", (*MEMBER, "step")),
    ),
    "assignment.notification": (
        Count("assignment_notifications_received_total", "Notifications to the application.", (*MEMBER, "kind")),
    ),
    "assignment.started": (
        Level("assignment_startup_recovery_streams", "Streams owned after the first placement.", MEMBER, "streams"),
        Level("assignment_startup_recovery_seconds", "Time from the start to the first placement.", MEMBER, "seconds"),
    ),
}
"""Every event of the three packages. Empty: ``ServiceMetrics`` handles it itself, or it only changes health."""


class ServiceMetrics:
    """An observer that counts events. Events of other packages are ignored.

    Series by consumer or member exist only with ``per_consumer``. A metric has at most ``max_series`` combinations of
    labels; further ones are counted under ``(other)``.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        per_consumer: bool = False,
        max_series: int = MAX_SERIES,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._hidden = frozenset() if per_consumer else PER_CONSUMER
        self._max_series = max_series
        self._now = now
        self._made: dict[str, Series[Any]] = {}
        self._logged_errors: set[str] = set()
        self._owned_since: dict[tuple[str, str, str], float] = {}
        self._on: dict[str, list[Callable[[Mapping[str, Any]], None]]] = {
            event: [self._handler(meaning) for meaning in meanings] for event, meanings in MEANINGS.items()
        }
        released = Count("assignment_leases_released_total", "Leases given back.", MEMBER)
        self._released = self._series(Counter, released)
        ended = (*MEMBER, "ended")
        owned = Time("assignment_stream_processing_seconds", "How long a stream was owned, by how that ended.", ended)
        self._ownership_seconds = self._series(Histogram, owned, buckets=(*LATENCY_BUCKETS, 1800, 7200, 86400))
        self._on["assignment.taken"].append(self._begin_stream)
        self._on["assignment.released"].append(self._release_streams)
        self._on["assignment.disowned"].append(lambda values: self._end_stream(values, values["stream"], "disowned"))
        self._on["assignment.finished"].append(lambda values: self._end_stream(values, values["stream"], "finished"))

    def __call__(self, name: str, /, **values: Any) -> None:
        self.count(name, values)

    def count(self, name: str, values: Mapping[str, Any]) -> None:
        """As ``__call__``, with the values as a mapping."""
        for handle in self._on.get(name, ()):
            try:
                handle(values)
            except Exception:
                # An observer must not raise: its caller is processing a message.
                if name not in self._logged_errors:
                    self._logged_errors.add(name)
                    log.exception("the event %s could not be counted; logged once", name)

    # --- metrics from the table -------------------------------------------------------------------------------------

    def _handler(self, meaning: Meaning) -> Callable[[Mapping[str, Any]], None]:
        match meaning:
            case Count():
                return self._counting(self._series(Counter, meaning), meaning.by)
            case Level():
                return self._setting(self._series(Gauge, meaning), meaning.to)
            case Time():
                return self._timing(self._series(Histogram, meaning, buckets=LATENCY_BUCKETS), meaning.of)

    @staticmethod
    def _counting(series: Series[Counter], by: str | None) -> Callable[[Mapping[str, Any]], None]:
        def count(values: Mapping[str, Any]) -> None:
            series.of(values).inc(1 if by is None else values[by])

        return count

    @staticmethod
    def _setting(series: Series[Gauge], to: str) -> Callable[[Mapping[str, Any]], None]:
        def put(values: Mapping[str, Any]) -> None:
            series.of(values).set(values[to])

        return put

    @staticmethod
    def _timing(series: Series[Histogram], of: str) -> Callable[[Mapping[str, Any]], None]:
        def observe(values: Mapping[str, Any]) -> None:
            series.of(values).observe(values[of])

        return observe

    def _series(self, kind: type[Any], meaning: Meaning, **options: Any) -> Series[Any]:
        if meaning.metric not in self._made:
            names = [name for name in meaning.labels if name not in self._hidden]
            metric = kind(f"millstream_{meaning.metric}", meaning.text, names, registry=self._registry, **options)
            self._made[meaning.metric] = Series(metric, names, max_series=self._max_series)
        return self._made[meaning.metric]

    # --- how long a stream was owned --------------------------------------------------------------------------------

    def _begin_stream(self, values: Mapping[str, Any]) -> None:
        self._owned_since[values["service"], values["member"], values["stream"]] = self._now()

    def _release_streams(self, values: Mapping[str, Any]) -> None:
        self._released.of(values).inc(len(values["streams"]))
        for stream in values["streams"]:
            self._end_stream(values, stream, "released")

    def _end_stream(self, values: Mapping[str, Any], stream: str, ended: str) -> None:
        since = self._owned_since.pop((values["service"], values["member"], stream), None)
        if since is not None:
            self._ownership_seconds.of({**values, "ended": ended}).observe(self._now() - since)
