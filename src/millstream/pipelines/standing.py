"""How a pipeline stands, for whoever asks: one record for the terminal, for HTTP and for ``status``. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

State = Literal["new", "running", "paused", "stopped", "finished", "failed"]


@dataclass(frozen=True, slots=True)
class Standing:
    """``sinks`` says of each: ``ok``; ``retrying``, it gates the checkpoint and has refused the batch at hand so far;
    ``failed``, the pipeline has given up on it; ``catching up`` or ``failing``, batches wait on disk for it.
    ``progress`` is that of the last batch that Spark reported on, except that its ``lag`` goes on being looked at while
    the next one takes long."""

    name: str
    tenant: str
    state: State
    error: str | None
    batch: int | None
    sinks: dict[str, str]
    progress: dict[str, Any]


def chosen(last: Any) -> dict[str, Any]:
    """What of Spark's progress people want to see."""
    if last is None:
        return {}
    sources = [
        {
            "input_rows_per_second": s.inputRowsPerSecond,
            "latest": s.latestOffset,
            "end": s.endOffset,
            "metrics": s.metrics,
        }
        for s in last.sources
    ]
    return {
        "batch": last.batchId,
        "rows": last.numInputRows,
        "input_rows_per_second": last.inputRowsPerSecond,
        "processed_rows_per_second": last.processedRowsPerSecond,
        "batch_ms": last.durationMs.get("triggerExecution"),
        "lag": lag(s.latestOffset for s in last.sources),
        "durations_ms": dict(last.durationMs),
        "late_rows": sum(op.numRowsDroppedByWatermark for op in last.stateOperators),
        "sources": sources,
    }


def lag(reports: Iterable[Any]) -> int | None:
    """Entries that the streams hold beyond the batch, all sources together; None where one of them cannot say.

    Our source tells it with the streams' ends, in what Spark calls the latest offset; other sources do not.
    """
    counted = [_lag(report) for report in reports]
    known = [count for count in counted if count is not None]
    return sum(known) if known and len(known) == len(counted) else None


def _lag(report: Any) -> int | None:
    try:
        streams = (json.loads(report) if isinstance(report, str) else report)["streams"]
        return sum(int(stream["lag"]) for stream in streams.values())
    except (AttributeError, KeyError, TypeError, ValueError):
        return None  # another source's offset, or a stream whose counts Redis cannot tell
