"""Pipelines over HTTP: how they stand, their checkpoints and dead letters; and pause, resume, stop, start."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from millstream.observe.http import error
from millstream.pipelines import PipelineUnknown, SinkUnknown

if TYPE_CHECKING:
    from collections.abc import Callable

    from millstream.pipelines import PipelineRun, Runner

_DEAD_LETTERS = 100
_VERBS = ("pause", "resume", "stop", "start")


class PipelineRoutes:
    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def routes(self) -> list[Route]:
        one = "/pipelines/{name}"
        return [
            Route("/pipelines", self._all),
            Route(one, self._known(lambda run, _: asdict(run.status()))),
            Route(f"{one}/checkpoints", self._known(_checkpoints)),
            Route(f"{one}/dlq", self._known(_dead_letters)),
            Route(f"{one}/sinks/{{sink}}/start", self._known(_start_sink), methods=["POST"]),
            *(Route(f"{one}/{verb}", self._known(_verb(verb)), methods=["POST"]) for verb in _VERBS),
        ]

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Ill when a pipeline has failed; a paused or finished one is well."""
        states = {status.name: status.state for status in self._runner.statuses()}
        return "failed" not in states.values(), {"pipelines": states}

    def ready(self) -> tuple[bool, dict[str, Any]]:
        """Ready when every pipeline has got past its start."""
        states = {status.name: status.state for status in self._runner.statuses()}
        return bool(states) and not {"new", "failed"} & set(states.values()), {"pipelines": states}

    def _all(self, request: Request) -> Response:
        return JSONResponse([asdict(status) for status in self._runner.statuses()])

    def _known(self, answer: Callable[[PipelineRun, Request], Any]) -> Callable[[Request], Response]:
        # Plain functions: Starlette runs them in a thread, and pausing waits for a batch to end.
        def handle(request: Request) -> Response:
            try:
                run = self._runner.named(request.path_params["name"])
                return JSONResponse(answer(run, request))
            except (PipelineUnknown, SinkUnknown) as problem:
                return error("not_found", str(problem), 404)

        return handle


def _verb(verb: str) -> Callable[[PipelineRun, Request], Any]:
    def act(run: PipelineRun, request: Request) -> Any:
        getattr(run, verb)()
        return asdict(run.status())

    return act


def _start_sink(run: PipelineRun, request: Request) -> Any:
    run.start_sink(request.path_params["sink"])
    return asdict(run.status())


def _checkpoints(run: PipelineRun, request: Request) -> Any:
    return [asdict(batch) for batch in run.checkpoint.batches()]


def _dead_letters(run: PipelineRun, request: Request) -> Any:
    target = run.plan.dead_letters
    if target is None:
        return {"stream": None, "entries": []}
    with target.address.open() as broker:
        found = broker.xrevrange(target.stream, count=_DEAD_LETTERS)
        total = broker.xlen(target.stream)
    shown = [{"id": str(e.id), **{k.decode(): v.decode(errors="replace") for k, v in e.fields.items()}} for e in found]
    return {"stream": target.stream, "total": total, "entries": shown}
