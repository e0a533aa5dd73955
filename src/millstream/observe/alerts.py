"""Alert rules for Prometheus over the metrics of services and pipelines.

A counter's series begins with its first event, and ``increase`` does not count the value that a series begins with.
So a rule about single events also looks for series that were not there before (``_happened``).

Every replica exposes the stats of the same streams: rules about streams take the highest value of all replicas.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

LAG_MIN: Final = 100
"""A lag below this is not reported, even if it grows fast."""
STUCK_AFTER_S: Final = 600
MEMORY_SHARE: Final = 0.9
LEASES_LOST: Final = 3
"""In 15 minutes; more is flapping."""
WORKER_DEATHS: Final = 3
"""In 15 minutes."""


class Alert(NamedTuple):
    """An alert rule. ``hold``: how long the expression must be true. ``action``: what the operator does."""

    name: str
    expression: str
    hold: str
    severity: str
    summary: str
    action: str

    def rule(self) -> dict[str, Any]:
        return {
            "alert": self.name,
            "expr": self.expression,
            "for": self.hold,
            "labels": {"severity": self.severity},
            "annotations": {"summary": self.summary, "description": self.action},
        }


def _happened(metric: str, by: str, window: str) -> str:
    """Whether a counter grew within the window, or appeared in it."""
    total = f"sum by ({by}) ({metric})"
    before = f"sum by ({by}) ({metric} offset {window})"
    return f"sum by ({by}) (increase({metric}[{window}])) > 0 or ({total} > 0 unless {before})"


_GROUP = "stream {{ $labels.stream }}, group {{ $labels.group }}"
_LAG = "max by (stream, group) (millstream_stream_group_lag)"

ALERTS: Final = (
    Alert(
        "MillstreamLagGrows",
        f"{_LAG} > {LAG_MIN} and max by (stream, group) (deriv(millstream_stream_group_lag[10m])) > 0",
        "10m",
        "warning",
        f"Lag grows: {_GROUP} is {{{{ $value }}}} entries behind",
        "Start more workers, or find out why handlers have become slower (the log, handler timings).",
    ),
    Alert(
        "MillstreamMessageStuck",
        f"max by (stream, group) (millstream_stream_group_oldest_pending_seconds) > {STUCK_AFTER_S}",
        "5m",
        "warning",
        f"A message is stuck: {_GROUP}",
        "`millstream pending ls STREAM GROUP` shows which consumer holds it and how often it was delivered.",
    ),
    Alert(
        "MillstreamNoConsumer",
        f"max by (stream, group) (millstream_stream_group_consumers) == 0 and {_LAG} > 0",
        "5m",
        "critical",
        f"Nothing reads: {_GROUP} has entries and no consumer",
        "Start the service that reads this group, or delete the group if it is no longer needed.",
    ),
    Alert(
        "MillstreamConsumerDied",
        _happened("millstream_messages_claimed_total", "topic, group", "10m"),
        "0m",
        "warning",
        "A consumer died: its entries of {{ $labels.topic }}, group {{ $labels.group }} were claimed",
        "Read the log of the worker that ended (out of memory, a crash) or was paused for too long.",
    ),
    Alert(
        "MillstreamWorkerDown",
        "min by (job, instance, worker) (millstream_worker_up) == 0",
        "2m",
        "critical",
        "Worker {{ $labels.worker }} of {{ $labels.instance }} is down or does not report",
        "The log of `millstream run` names the reason of its death. If it runs, its event loop is blocked.",
    ),
    Alert(
        "MillstreamWorkerRestarts",
        f"sum by (job, instance, worker) (increase(millstream_worker_deaths_total[15m])) > {WORKER_DEATHS}",
        "0m",
        "warning",
        "Worker {{ $labels.worker }} of {{ $labels.instance }} dies again and again",
        "The log of `millstream run` names the signal or the error of each death.",
    ),
    Alert(
        "MillstreamNotReady",
        "max by (job, instance, what) (max_over_time(millstream_ready[2m])) == 0",
        "1m",
        "critical",
        "{{ $labels.what }} of {{ $labels.instance }} is not ready",
        "Request /ready with the access token: the response names the topics that are not read.",
    ),
    Alert(
        "MillstreamFailed",
        "max by (job, instance) (millstream_failed) > 0",
        "2m",
        "critical",
        "{{ $labels.instance }} has failed and does not recover by itself",
        "Request /health with the access token and read the log; then restart the service.",
    ),
    Alert(
        "MillstreamDeadLetters",
        _happened("millstream_messages_buried_total", "topic, group", "10m"),
        "0m",
        "warning",
        "Dead letters: {{ $labels.topic }}, group {{ $labels.group }}",
        "`millstream dlq ls STREAM` shows the errors. Fix the cause, then `millstream dlq replay STREAM`.",
    ),
    Alert(
        "MillstreamPublishFailed",
        _happened("millstream_publish_failures_total", "topic", "10m"),
        "0m",
        "critical",
        "Messages for {{ $labels.topic }} could not be published",
        "The publishers received the error: find out which ones gave up, and publish again.",
    ),
    Alert(
        "MillstreamUnreadEntriesDropped",
        f"{_happened('millstream_retention_lost_undelivered_total', 'stream, group', '1h')} or "
        f"{_happened('millstream_broker_lost_undelivered_total', 'stream, group', '1h')}",
        "0m",
        "critical",
        f"A hard limit dropped unread entries: {_GROUP}",
        "Raise the hard limit of the stream, or make the group read faster. The entries are gone.",
    ),
    Alert(
        "MillstreamMemoryNearLimit",
        "max by (job) (millstream_server_memory_bytes) / max by (job) (millstream_server_memory_limit_bytes) "
        f"> {MEMORY_SHARE}",
        "5m",
        "critical",
        "Redis uses {{ $value | humanizePercentage }} of its maxmemory",
        "Trim streams (`millstream retention ls` shows which group holds entries), or raise maxmemory.",
    ),
    Alert(
        "MillstreamBrokerUnreachable",
        "max by (job, instance) (millstream_survey_up) == 0",
        "2m",
        "critical",
        "{{ $labels.instance }} cannot reach its broker",
        "Check that the server runs, and that the network and the password are right: `millstream doctor`.",
    ),
    Alert(
        "MillstreamLeaseFlapping",
        f"sum by (service) (increase(millstream_assignment_streams_disowned_total[15m])) > {LEASES_LOST}",
        "0m",
        "warning",
        "Streams of {{ $labels.service }} change their owner again and again",
        "Members are paused for longer than their lease: check for blocked event loops, CPU limits and clock jumps.",
    ),
    Alert(
        "MillstreamPipelineFailed",
        'max by (pipeline) (millstream_pipeline_status{state="failed"}) == 1',
        "0m",
        "critical",
        "Pipeline {{ $labels.pipeline }} has failed",
        "`millstream pipeline status FILE` shows the error. Restarted, it continues from its checkpoint.",
    ),
    Alert(
        "MillstreamPipelineDeadLetters",
        _happened("millstream_dlq_events_total", "pipeline", "10m"),
        "0m",
        "warning",
        "Dead letters of pipeline {{ $labels.pipeline }}",
        "The entries of the pipeline's dead-letter stream name the error.",
    ),
    Alert(
        "MillstreamSinkQueueFull",
        _happened("millstream_sink_dropped_batches_total", "pipeline, sink", "10m"),
        "0m",
        "critical",
        "The queue of sink {{ $labels.sink }} of pipeline {{ $labels.pipeline }} is full",
        "Its oldest batches were dropped. Repair the sink's target, or raise the limit of the queue.",
    ),
    Alert(
        "MillstreamSinkBehind",
        "min by (pipeline, sink) (min_over_time(millstream_sink_spooled_batches[15m])) > 0",
        "5m",
        "warning",
        "Sink {{ $labels.sink }} of pipeline {{ $labels.pipeline }} does not catch up",
        "Batches wait on disk. Check the sink's target before the queue is full.",
    ),
)


def alert_rules() -> dict[str, Any]:
    """The content of a rules file of Prometheus."""
    return {"groups": [{"name": "millstream", "rules": [alert.rule() for alert in ALERTS]}]}
