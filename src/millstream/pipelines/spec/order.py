"""In which order processors may stand, and why not in another. Over their types alone, so that it needs no Spark."""

from __future__ import annotations

from collections.abc import Sequence

STATEFUL = ("deduplicate", "aggregate")
PER_BATCH = ("sql", "python")


def order_problems(kinds: Sequence[object]) -> list[tuple[int, str]]:
    problems: list[tuple[int, str]] = []
    per_batch: str | None = None
    aggregated = False
    for index, kind in enumerate(kinds):
        if kind in STATEFUL and per_batch is not None:
            why = (
                f"{kind} cannot stand after {per_batch}: {per_batch} runs inside each batch, and {kind} keeps state "
                f"over batches, which Spark does before a batch begins. Put {kind} first."
            )
            problems.append((index, why))
        elif kind in STATEFUL and aggregated:
            why = (
                f"{kind} cannot stand after aggregate: a window's event leaves when the watermark has passed it, so "
                f"everything that follows would find it late. Put {kind} first, or use a second pipeline."
            )
            problems.append((index, why))
        if kind in PER_BATCH:
            per_batch = str(kind)
        aggregated = aggregated or kind == "aggregate"
    return problems
