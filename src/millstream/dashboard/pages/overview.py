"""The overview page: all streams, sorted by urgency, and the findings that need attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from millstream.dashboard.render import Query, address, clock
from millstream.dashboard.shared import Shared, Values, WebPage, dead_letter_stream_of
from millstream.observe.streams import StreamRow

ROWS = 100
FINDINGS = 8

Key = Callable[[StreamRow], Any]
SORTS: dict[str, tuple[str, Key]] = {
    "need": ("urgency", lambda row: (-(row.lag or 0), -(row.oldest_pending_ms or 0), -row.dead_letters, -row.pending)),
    "lag": ("lag", lambda row: -(row.lag or 0)),
    "oldest": ("oldest pending", lambda row: -(row.oldest_pending_ms or 0)),
    "dead": ("dead letters", lambda row: -row.dead_letters),
    "memory": ("memory", lambda row: -(row.memory_bytes or 0)),
    "rate": ("added a second", lambda row: -(row.added_per_s or 0)),
    "length": ("entries", lambda row: -row.length),
    "name": ("name", lambda row: ()),
}


async def load(shared: Shared, query: Query, root: str) -> Values:
    stats = shared.stats
    await stats.request()
    match = query.text("match")
    sort = query.text("sort", "need")
    sort = sort if sort in SORTS else "need"
    skip = query.number("skip", 0, maximum=10_000_000)
    sort_label, key = SORTS[sort]
    rows = [row for row in stats.rows if match.lower() in row.stream.lower()] if match else stats.rows
    ordered = sorted(rows, key=lambda row: (key(row), row.stream))
    visible = ordered[skip : skip + ROWS]
    latest = stats.latest

    def at(position: int) -> str:
        params = [
            ("match", match),
            ("sort", sort if sort != "need" else ""),
            ("skip", str(position) if position else ""),
        ]
        return root + address("/", params)

    return {
        "total": len(stats.rows),
        "added": sum(row.added_per_s or 0.0 for row in stats.rows) if stats.previous else None,
        "max_lag": max((row.lag for row in stats.rows if row.lag is not None), default=None),
        "pending": sum(row.pending for row in stats.rows),
        "dead_letters": sum(stream.length for name, stream in stats.streams.items() if name.endswith(".dlq")),
        "used_memory": latest.used_memory if latest else 0,
        "max_memory": latest.max_memory if latest else 0,
        "read_at": clock(latest.at_ms)[11:] if latest else "",
        "findings": stats.findings[:FINDINGS],
        "more_findings": max(0, len(stats.findings) - FINDINGS),
        "examined": stats.is_examined,
        "examined_at": clock(stats.examined_at_ms)[11:] if stats.examined_at_ms else "",
        "match": match,
        "sort": sort,
        "sort_label": sort_label,
        "sorts": [(name, label) for name, (label, _) in SORTS.items()],
        "rows": [_row_values(shared, row) for row in visible],
        "no_memory": bool(visible) and all(row.memory_bytes is None for row in visible),
        "first": skip + 1 if visible else 0,
        "last": skip + len(visible),
        "matching": len(ordered),
        "before": at(max(0, skip - ROWS)) if skip else None,
        "after": at(skip + ROWS) if skip + ROWS < len(ordered) else None,
    }


def _row_values(shared: Shared, row: StreamRow) -> dict[str, Any]:
    stats = shared.stats
    return {
        **row._asdict(),
        "rates": stats.rates.of(row.stream),
        "lags": stats.lags.of(row.stream),
        "dlq": dead_letter_stream_of(row.stream),
    }


PAGES = (WebPage("/", "overview.html", "/", load),)
