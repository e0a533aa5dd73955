"""The pipelines page: the state of each pipeline, and pause, resume, stop, start; asks the processes that run them."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.concurrency import run_in_threadpool

from millstream.dashboard.render import BatchBar, Query, address, clock, encode_name
from millstream.dashboard.shared import Action, History, Outcome, Question, Shared, Values, WebPage
from millstream.errors import InvalidArgument, MillstreamError
from millstream.observe.pipeline_client import PipelineClient

MAX_BATCHES = 30
MAX_PIPELINES = 100
LEVELS = {"running": "ok", "finished": "ok", "paused": "warning", "stopped": "warning", "failed": "problem"}
SINK_LEVELS = {
    "ok": "ok",
    "catching up": "note",
    "not answering": "warning",
    "retrying": "warning",
    "failing": "warning",
    "refused": "problem",
    "failed": "problem",
}
VERBS = {
    "running": ("pause", "stop"),
    "paused": ("resume", "stop"),
    "stopped": ("start",),
    "finished": ("start",),
    "failed": ("start",),
    "new": ("stop",),
}
EFFECTS = {
    "pause": "It finishes the current batch, then reads nothing until it is resumed.",
    "resume": "It continues where it was paused.",
    "stop": "It ends after the current batch. Its checkpoint is kept, so it can be started again.",
    "start": "It continues from its checkpoint.",
}


async def load(shared: Shared, query: Query, root: str) -> Values:
    await shared.stats.request()
    replies = await asyncio.gather(*(_read(client) for client in shared.pipelines))
    pipelines: list[dict[str, Any]] = []
    problems = [
        {"url": client.url, "text": reply}
        for client, reply in zip(shared.pipelines, replies, strict=True)
        if isinstance(reply, str)
    ]
    history = shared.page_state.setdefault("pipelines", (History(), History(), [-1]))
    for number, reply in enumerate(replies):
        if not isinstance(reply, str):
            pipelines += [
                _pipeline_values(number, status, batches, letters, root) for status, batches, letters in reply
            ]
    _add_history(shared, history, pipelines)
    return {"is_configured": bool(shared.pipelines), "problems": problems, "pipelines": pipelines}


async def _read(client: PipelineClient) -> str | list[tuple[Any, Any, Any]]:
    """Return status, batches and dead letters of each pipeline of a process, or the error as text."""
    try:
        return await run_in_threadpool(_read_all, client)
    except MillstreamError as error:
        return str(error)


def _read_all(client: PipelineClient) -> list[tuple[Any, Any, Any]]:
    pipelines = []
    for status in client.statuses()[:MAX_PIPELINES]:
        name = str(status["name"])
        batches: Any = []
        letters: Any = {}
        try:
            batches = client.batches(name)[:MAX_BATCHES]
            letters = client.dead_letters(name)
        except MillstreamError:
            pass  # the status is shown without them
        pipelines.append((status, batches, letters))
    return pipelines


def _add_history(shared: Shared, history: Any, pipelines: list[dict[str, Any]]) -> None:
    """Add one point per reading of the stream stats, however many pages are open."""
    rates, lags, last_version = history
    if last_version[0] != shared.stats.version:
        last_version[0] = shared.stats.version
        rates.add({(pipeline["key"],): pipeline["rows_per_s"] for pipeline in pipelines})
        lags.add({(pipeline["key"],): pipeline["lag"] for pipeline in pipelines})
    for pipeline in pipelines:
        pipeline |= {"rates": rates.of(pipeline["key"]), "lags": lags.of(pipeline["key"])}


def _pipeline_values(
    number: int, status: dict[str, Any], batches: Any, letters: dict[str, Any], root: str
) -> dict[str, Any]:
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
        "batch": _to_int(status["batch"]),
        "rows": _to_int(progress.get("rows")),
        "rows_per_s": _to_float(progress.get("processed_rows_per_second")),
        "lag": _to_int(progress.get("lag")),
        "batch_ms": _to_int(progress.get("batch_ms")),
        "run_by": _run_by(status.get("holder")),
        "source": str(status["source"]),
        "source_level": SINK_LEVELS.get(str(status["source"]), "note"),
        "sinks": [
            {
                "name": str(sink),
                "state": str(sink_state),
                "level": SINK_LEVELS.get(str(sink_state), "note"),
                "waiting": _to_int(waiting.get(sink)) or 0,
            }
            for sink, sink_state in sinks.items()
        ],
        "batches": _bars(batches),
        "dead_letters": _to_int(total) if letters.get("stream") is not None else None,
        "dlq": str(letters.get("stream") or ""),
        "verbs": [
            (
                verb,
                root
                + address("/pipelines/confirm", [("at", str(number)), ("name", encode_name(name)), ("verb", verb)]),
            )
            for verb in VERBS.get(state, ())
        ],
    }


def _run_by(holder: Any) -> str:
    """Return who runs the pipeline, as one line; empty if the process did not report it."""
    if not isinstance(holder, dict):
        return ""
    return f"process {holder.get('process')} on {holder.get('host')} since {holder.get('since')}"


def _bars(batches: Any) -> list[BatchBar]:
    bars = []
    for batch in batches:
        id, planned, committed = (_to_int(batch.get(key)) for key in ("id", "planned_ms", "committed_ms"))
        if id is not None and planned is not None:
            bars.append(BatchBar(id, clock(planned), None if committed is None else max(0, committed - planned)))
    return sorted(bars)


def _to_int(value: Any) -> int | None:
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e18 else None


def _to_float(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and abs(value) < 1e18 else None


# --- pause, resume, stop, start ---


def _target(shared: Shared, query: Query) -> tuple[PipelineClient, str, str]:
    number, verb = query.number("at", 0, maximum=1_000), query.text("verb")
    if number >= len(shared.pipelines) or verb not in EFFECTS:
        raise InvalidArgument("pipeline", query.text("at"), "a pipeline that the page Pipelines lists")
    return shared.pipelines[number], query.name("name"), verb


async def ask(shared: Shared, query: Query, root: str) -> Question:
    client, name, verb = _target(shared, query)
    status = await run_in_threadpool(client.status, name)
    hidden = [("at", query.text("at")), ("name", encode_name(name)), ("verb", verb)]
    affected = [("pipeline", name), ("process", client.url), ("state", str(status["state"]))]
    affected += [("last committed batch", str(status["batch"]))]
    question = f"{verb.capitalize()} the pipeline {name}? {EFFECTS[verb]}"
    return Question(
        f"{verb.capitalize()} a pipeline",
        question,
        verb.capitalize(),
        root + "/pipelines",
        hidden,
        affected=affected,
        dangerous=verb == "stop",
    )


async def act(shared: Shared, query: Query) -> Outcome:
    client, name, verb = _target(shared, query)
    status = await run_in_threadpool(client.control, name, verb)
    return Outcome(f"Pipeline {name} is {status.get('state')} now.")


def describe(query: Query) -> str:
    return f"{query.text('verb')} pipeline {query.name('name')}"


PAGES = (WebPage("/pipelines", "pipelines.html", "/pipelines", load),)
ACTIONS = (Action("/pipelines/confirm", "/pipelines", ask, act, describe),)
