"""Everything at a glance: streams by need, and what needs attention in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from millstream.dashboard.render import Query, address, clock
from millstream.dashboard.shared import Shared, Values, WebPage, dead_letters_of
from millstream.observe import Row

ROWS = 100
FINDINGS = 8

Key = Callable[[Row], Any]
SORTS: dict[str, tuple[str, Key]] = {
    "need": ("need", lambda row: (-(row.lag or 0), -(row.oldest_pending_ms or 0), -row.dead_letters, -row.pending)),
    "lag": ("lag", lambda row: -(row.lag or 0)),
    "oldest": ("oldest pending", lambda row: -(row.oldest_pending_ms or 0)),
    "dead": ("dead letters", lambda row: -row.dead_letters),
    "memory": ("memory", lambda row: -(row.memory_bytes or 0)),
    "rate": ("added a second", lambda row: -(row.added_per_s or 0)),
    "length": ("entries", lambda row: -row.length),
    "name": ("name", lambda row: ()),
}


async def load(shared: Shared, query: Query, root: str) -> Values:
    survey = shared.survey
    await survey.wanted()
    match = query.text("match")
    sort = query.text("sort", "need")
    sort = sort if sort in SORTS else "need"
    skip = query.number("skip", 0, most=10_000_000)
    word, key = SORTS[sort]
    rows = [row for row in survey.rows if match.lower() in row.stream.lower()] if match else survey.rows
    ordered = sorted(rows, key=lambda row: (key(row), row.stream))
    shown = ordered[skip : skip + ROWS]
    look = survey.look

    def at(position: int) -> str:
        kept = [("match", match), ("sort", sort if sort != "need" else ""), ("skip", str(position) if position else "")]
        return root + address("/", kept)

    return {
        "total": len(survey.rows),
        "added": sum(row.added_per_s or 0.0 for row in survey.rows) if survey.before else None,
        "most_lag": max((row.lag for row in survey.rows if row.lag is not None), default=None),
        "pending": sum(row.pending for row in survey.rows),
        "buried": sum(one.length for name, one in survey.streams.items() if name.endswith(".dlq")),
        "used_memory": look.used_memory if look else 0,
        "max_memory": look.max_memory if look else 0,
        "looked_at": clock(look.at_ms)[11:] if look else "",
        "findings": survey.findings[:FINDINGS],
        "more_findings": max(0, len(survey.findings) - FINDINGS),
        "examined": survey.examined,
        "match": match,
        "sort": sort,
        "sort_word": word,
        "sorts": [(name, words) for name, (words, _) in SORTS.items()],
        "rows": [_shown(shared, row) for row in shown],
        "no_memory": bool(shown) and all(row.memory_bytes is None for row in shown),
        "first": skip + 1 if shown else 0,
        "last": skip + len(shown),
        "matching": len(ordered),
        "before": at(max(0, skip - ROWS)) if skip else None,
        "after": at(skip + ROWS) if skip + ROWS < len(ordered) else None,
    }


def _shown(shared: Shared, row: Row) -> dict[str, Any]:
    survey = shared.survey
    return {
        **row._asdict(),
        "rates": survey.rates.of(row.stream),
        "lags": survey.lags.of(row.stream),
        "dlq": dead_letters_of(row.stream),
    }


PAGES = (WebPage("/", "overview.html", "/", load),)
