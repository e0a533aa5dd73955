"""Pipelines: how they stand, at the processes that run them; and pause, resume, stop, start again."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.concurrency import run_in_threadpool

from millstream.dashboard.render import BatchBar, Query, address, clock, name_word
from millstream.dashboard.shared import Action, Curves, Outcome, Question, Shared, Values, WebPage
from millstream.errors import InvalidArgument, MillstreamError
from millstream.observe import PipelineClient

LAST_BATCHES = 30
MOST = 100
LEVELS = {"running": "ok", "finished": "ok", "paused": "warning", "stopped": "warning", "failed": "problem"}
SINK_LEVELS = {"ok": "ok", "catching up": "note", "retrying": "warning", "failing": "warning", "failed": "problem"}
VERBS = {
    "running": ("pause", "stop"),
    "paused": ("resume", "stop"),
    "stopped": ("start",),
    "finished": ("start",),
    "failed": ("start",),
    "new": ("stop",),
}
SENTENCES = {
    "pause": "Nothing is read until it is resumed; the batch at hand is finished first.",
    "resume": "It goes on where it was paused.",
    "stop": "It ends after the batch at hand; its checkpoint stays, and it can be started again.",
    "start": "It starts again from its checkpoint.",
}


async def load(shared: Shared, query: Query, root: str) -> Values:
    await shared.survey.wanted()
    found = await asyncio.gather(*(_ask(number, client) for number, client in enumerate(shared.pipelines)))
    shown: list[dict[str, Any]] = []
    problems = [
        {"url": client.url, "text": told}
        for client, told in zip(shared.pipelines, found, strict=True)
        if isinstance(told, str)
    ]
    curves = shared.remembered.setdefault("pipelines", (Curves(), Curves(), [-1]))
    for number, told in enumerate(found):
        if not isinstance(told, str):
            shown += [_shown(number, status, batches, letters, root) for status, batches, letters in told]
    _remember(shared, curves, shown)
    return {"asked": bool(shared.pipelines), "problems": problems, "pipelines": shown}


async def _ask(number: int, client: PipelineClient) -> str | list[tuple[Any, Any, Any]]:
    """What it answers, or why it does not."""
    try:
        return await run_in_threadpool(_everything, client)
    except MillstreamError as problem:
        return str(problem)


def _everything(client: PipelineClient) -> list[tuple[Any, Any, Any]]:
    told = []
    for status in client.statuses()[:MOST]:
        name = str(status["name"])
        batches: Any = []
        letters: Any = {}
        try:
            batches = client.batches(name)[:LAST_BATCHES]
            letters = client.dead_letters(name)
        except MillstreamError:
            pass  # the rest is worth showing
        told.append((status, batches, letters))
    return told


def _remember(shared: Shared, curves: Any, shown: list[dict[str, Any]]) -> None:
    """A point for each look, however many pages are open."""
    rates, lags, last = curves
    if last[0] != shared.survey.at:
        last[0] = shared.survey.at
        rates.add({(one["key"],): one["rows_per_s"] for one in shown})
        lags.add({(one["key"],): one["lag"] for one in shown})
    for one in shown:
        one |= {"rates": rates.of(one["key"]), "lags": lags.of(one["key"])}


def _shown(number: int, status: dict[str, Any], batches: Any, letters: dict[str, Any], root: str) -> dict[str, Any]:
    progress = status["progress"] if isinstance(status["progress"], dict) else {}
    name, state = str(status["name"]), str(status["state"])
    sinks = status["sinks"] if isinstance(status["sinks"], dict) else {}
    waiting = status["waiting"] if isinstance(status["waiting"], dict) else {}
    total = letters.get("total")
    return {
        "key": f"{number} {name}",
        "name": name,
        "state": state,
        "level": LEVELS.get(state, "note"),
        "error": status["error"] or "",
        "batch": _whole(status["batch"]),
        "rows": _whole(progress.get("rows")),
        "rows_per_s": _number(progress.get("processed_rows_per_second")),
        "lag": _whole(progress.get("lag")),
        "batch_ms": _whole(progress.get("batch_ms")),
        "source": str(status["source"]),
        "source_level": SINK_LEVELS.get(str(status["source"]), "note"),
        "sinks": [
            {
                "name": str(sink),
                "state": str(how),
                "level": SINK_LEVELS.get(str(how), "note"),
                "waiting": _whole(waiting.get(sink)) or 0,
            }
            for sink, how in sinks.items()
        ],
        "batches": _bars(batches),
        "dead_letters": _whole(total) if letters.get("stream") is not None else None,
        "dlq": str(letters.get("stream") or ""),
        "verbs": [
            (
                verb,
                root + address("/pipelines/confirm", [("at", str(number)), ("name", name_word(name)), ("verb", verb)]),
            )
            for verb in VERBS.get(state, ())
        ],
    }


def _bars(batches: Any) -> list[BatchBar]:
    shown = []
    for one in batches:
        id, planned, committed = (_whole(one.get(key)) for key in ("id", "planned_ms", "committed_ms"))
        if id is not None and planned is not None:
            shown.append(BatchBar(id, clock(planned), None if committed is None else max(0, committed - planned)))
    return sorted(shown)


def _whole(value: Any) -> int | None:
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e18 else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and abs(value) < 1e18 else None


# --- pause, resume, stop, start ---


def _meant(shared: Shared, query: Query) -> tuple[PipelineClient, str, str]:
    number, verb = query.number("at", 0, most=1_000), query.text("verb")
    if number >= len(shared.pipelines) or verb not in SENTENCES:
        raise InvalidArgument("pipeline", query.text("at"), "a pipeline of the page Pipelines")
    return shared.pipelines[number], query.name("name"), verb


async def ask(shared: Shared, query: Query, root: str) -> Question:
    client, name, verb = _meant(shared, query)
    status = await run_in_threadpool(client.status, name)
    hidden = [("at", query.text("at")), ("name", name_word(name)), ("verb", verb)]
    touches = [("pipeline", name), ("runs at", client.url), ("state now", str(status["state"]))]
    touches += [("last committed batch", str(status["batch"]))]
    question = f"{verb.capitalize()} the pipeline {name}? {SENTENCES[verb]}"
    return Question(
        f"{verb.capitalize()} a pipeline",
        question,
        verb.capitalize(),
        root + "/pipelines",
        hidden,
        touches=touches,
        dangerous=verb == "stop",
    )


async def act(shared: Shared, query: Query) -> Outcome:
    client, name, verb = _meant(shared, query)
    status = await run_in_threadpool(client.tell, name, verb)
    return Outcome(f"Pipeline {name} is {status.get('state')} now.")


def tell(query: Query) -> str:
    return f"{query.text('verb')} pipeline {query.name('name')}"


PAGES = (WebPage("/pipelines", "pipelines.html", "/pipelines", load),)
ACTIONS = (Action("/pipelines/confirm", "/pipelines", ask, act, tell),)
