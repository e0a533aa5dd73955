"""What the facts of brokers, messaging and assignment mean as metrics: a table, and the observer that goes by it.

Told facts, never asking. Texts of errors are no labels: they may hold anything, and there is no end of them.
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
KEPT = ("stream", "group")
MEMBER = ("service", "member")
PER_CONSUMER = frozenset({"consumer", "member"})
"""Labels that only those get who ask for them: there are as many values as there ever were processes."""


class Count(NamedTuple):
    """A counter that grows by the fact's ``by``, or by one."""

    metric: str
    text: str
    labels: tuple[str, ...] = ()
    by: str | None = None


class Level(NamedTuple):
    """A gauge that is set to the fact's ``to``."""

    metric: str
    text: str
    labels: tuple[str, ...]
    to: str


class Time(NamedTuple):
    """A histogram of the fact's ``of``, in seconds."""

    metric: str
    text: str
    labels: tuple[str, ...]
    of: str = "seconds"


Meaning = Count | Level | Time

HANDLER = ("handler", "topic", "group")

MEANINGS: Mapping[str, tuple[Meaning, ...]] = {
    "broker.retry": (Count("broker_retries_total", "Calls to a server that were tried again."),),
    "broker.dropped_undelivered": (
        Count("broker_lost_undelivered_total", "Unread entries that hard_max_stream_len dropped.", KEPT, "undelivered"),
        Count("broker_lost_unacked_total", "Pending entries that hard_max_stream_len dropped.", KEPT, "unacked"),
    ),
    "broker.trim_failed": (Count("broker_trim_failures_total", "Trims after an add that failed.", ("stream",)),),
    "broker.listener_lost": (Count("broker_listener_losses_total", "Subscriptions that broke, and began anew."),),
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
        Count("publish_failures_total", "Messages whose publishing was given up.", ("topic", "error_type"), "messages"),
    ),
    # --- subscribing
    "messaging.subscribed": (Count("subscriptions_total", "Times that reading a topic began.", READ),),
    "messaging.received": (Count("messages_received_total", "Entries that were read.", READ, "entries"),),
    "messaging.claimed": (
        Count("messages_claimed_total", "Entries taken over from consumers that fell silent.", READ, "entries"),
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
    "messaging.retried": (Count("messages_retried_total", "Messages put off to be delivered again.", READ, "entries"),),
    "messaging.buried": (Count("messages_buried_total", "Messages moved to the dead letters.", READ),),
    "messaging.undecodable": (Count("messages_undecodable_total", "Entries that no codec could read.", READ),),
    "messaging.lost": (
        Count("messages_lost_to_others_total", "Entries that other members took while held here.", READ, "entries"),
    ),
    "messaging.hold_expired": (
        Count("messages_hold_expired_total", "Messages let go after max_hold_ms without an outcome.", READ, "entries"),
    ),
    "messaging.stuck": (
        Count("subscriptions_stuck_total", "Times that a topic was full of messages that nobody settles.", READ),
    ),
    "messaging.ack_refused": (
        Count("acks_refused_total", "Acknowledgements that came after others had the entry.", READ, "entries"),
    ),
    "messaging.consumer_shared": (
        Count("consumer_names_shared_total", "Times that another process was met under the own consumer name.", READ),
    ),
    "messaging.entries_gone": (
        Count("pending_entries_gone_total", "Pending entries that were deleted or trimmed.", READ, "entries"),
    ),
    "messaging.read_failed": (Count("read_errors_total", "Reads that failed and are tried again.", READ),),
    "messaging.reader_stalled": (Count("reader_stalls_total", "Reads that never came back.", READ),),
    "messaging.settle_retried": (Count("settle_retries_total", "Outcomes that had to be said again.", READ),),
    "messaging.settle_failed": (
        Count("settle_failures_total", "Messages whose outcome was given up.", READ, "entries"),
    ),
    "messaging.keeping_failed": (Count("keeping_errors_total", "Signs of life or sweeps that failed.", READ),),
    "messaging.part_restarted": (
        Count("part_restarts_total", "Parts that met what nobody foresaw and began again.", (*READ, "part")),
    ),
    "messaging.group_restored": (Count("groups_restored_total", "Groups that had vanished and were made anew.", READ),),
    "messaging.consumer_retired": (
        Count("consumers_retired_total", "Consumers without work that were removed after long silence.", READ),
    ),
    "messaging.subscription_failed": (
        Count("subscription_failures_total", "Subscriptions that ended by an error.", (*READ, "error_type")),
    ),
    "messaging.route_failed": (
        Count("route_failures_total", "Handlers whose reading ended and is begun again.", ("handler", "topic")),
    ),
    # --- retention
    "messaging.trimmed": (
        Count("retention_dropped_total", "Entries that a policy let go.", ("stream",), "dropped"),
        Level("retention_stream_length", "Entries left after the last sweep.", ("stream",), "length"),
    ),
    "messaging.dropped_undelivered": (
        Count("retention_lost_undelivered_total", "Unread entries that a hard cap dropped.", KEPT, "undelivered"),
        Count("retention_lost_unacked_total", "Pending entries that a hard cap dropped.", KEPT, "unacked"),
    ),
    "messaging.held_back": (
        Level("retention_held_back_entries", "Entries kept for a group when last swept.", KEPT, "entries"),
    ),
    "messaging.retention_failed": (Count("retention_failures_total", "Sweeps of a stream that failed.", ("stream",)),),
    # --- assignment
    "assignment.claimed": (
        Count("assignment_claim_attempts_total", "Leases that were asked for.", MEMBER, "tried"),
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
        Count("assignment_streams_handed_over_total", "Streams given up to even out the load.", MEMBER, "streams"),
    ),
    "assignment.disowned": (Count("assignment_streams_disowned_total", "Streams found to be others' by now.", MEMBER),),
    "assignment.finished": (Count("assignment_streams_finished_total", "Streams whose work is done.", MEMBER),),
    "assignment.malformed": (Count("assignment_malformed_total", "Announcements that were buried.", MEMBER),),
    "assignment.unanswered": (Count("assignment_unanswered_total", "Streams whose server refused an answer.", MEMBER),),
    "assignment.step_failed": (
        Count("assignment_step_failures_total", "Beats or sweeps that failed.", (*MEMBER, "step")),
    ),
    "assignment.notification": (
        Count("assignment_notifications_received_total", "Notifications to the application.", (*MEMBER, "kind")),
    ),
    "assignment.started": (
        Level("assignment_startup_recovery_streams", "Streams owned after the first placing.", MEMBER, "streams"),
        Level("assignment_startup_recovery_seconds", "Time from the start to the first placing.", MEMBER, "seconds"),
    ),
}
"""Every fact of the three rooms. Empty: what it means is worked out below."""


class ServiceMetrics:
    """An observer: call it with facts. Facts of other rooms are ignored.

    Series by consumer or member only with ``per_consumer``. A metric has room for ``max_series`` combinations of
    labels; the rest is counted under ``(other)``.
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
        self._complained: set[str] = set()
        self._owned_since: dict[tuple[str, str, str], float] = {}
        self._on: dict[str, list[Callable[[Mapping[str, Any]], None]]] = {
            fact: [self._handler(meaning) for meaning in meanings] for fact, meanings in MEANINGS.items()
        }
        released = Count("assignment_leases_released_total", "Leases given back.", MEMBER)
        self._released = self._series(Counter, released)
        ended = (*MEMBER, "ended")
        held = Time("assignment_stream_processing_seconds", "How long a stream was owned, by how that ended.", ended)
        self._held = self._series(Histogram, held, buckets=(*LATENCY_BUCKETS, 1800, 7200, 86400))
        self._on["assignment.taken"].append(self._begin_stream)
        self._on["assignment.released"].append(self._release_streams)
        self._on["assignment.disowned"].append(lambda facts: self._end_stream(facts, facts["stream"], "disowned"))
        self._on["assignment.finished"].append(lambda facts: self._end_stream(facts, facts["stream"], "finished"))

    def __call__(self, name: str, /, **facts: Any) -> None:
        self.count(name, facts)

    def count(self, name: str, facts: Mapping[str, Any]) -> None:
        """The same for facts that are a mapping already."""
        for handle in self._on.get(name, ()):
            try:
                handle(facts)
            except Exception:
                # An observer must not raise: whoever tells a fact is in the middle of somebody's message.
                if name not in self._complained:
                    self._complained.add(name)
                    log.exception("the fact %s could not be counted; said once", name)

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
        def count(facts: Mapping[str, Any]) -> None:
            series.of(facts).inc(1 if by is None else facts[by])

        return count

    @staticmethod
    def _setting(series: Series[Gauge], to: str) -> Callable[[Mapping[str, Any]], None]:
        def put(facts: Mapping[str, Any]) -> None:
            series.of(facts).set(facts[to])

        return put

    @staticmethod
    def _timing(series: Series[Histogram], of: str) -> Callable[[Mapping[str, Any]], None]:
        def observe(facts: Mapping[str, Any]) -> None:
            series.of(facts).observe(facts[of])

        return observe

    def _series(self, kind: type[Any], meaning: Meaning, **options: Any) -> Series[Any]:
        if meaning.metric not in self._made:
            names = [name for name in meaning.labels if name not in self._hidden]
            metric = kind(f"millstream_{meaning.metric}", meaning.text, names, registry=self._registry, **options)
            self._made[meaning.metric] = Series(metric, names, max_series=self._max_series)
        return self._made[meaning.metric]

    # --- how long a stream was owned --------------------------------------------------------------------------------

    def _begin_stream(self, facts: Mapping[str, Any]) -> None:
        self._owned_since[facts["service"], facts["member"], facts["stream"]] = self._now()

    def _release_streams(self, facts: Mapping[str, Any]) -> None:
        self._released.of(facts).inc(len(facts["streams"]))
        for stream in facts["streams"]:
            self._end_stream(facts, stream, "released")

    def _end_stream(self, facts: Mapping[str, Any], stream: str, ended: str) -> None:
        since = self._owned_since.pop((facts["service"], facts["member"], stream), None)
        if since is not None:
            self._held.of({**facts, "ended": ended}).observe(self._now() - since)
