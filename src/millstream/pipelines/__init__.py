"""Pipelines: YAML enters, is refused whole or becomes a plan, and runs on Spark until its sinks have the events.

What is decided (spec, plan, fingerprints, commit, backoff) is pure and needs no Spark; what runs follows the plan.
No Redis command and no detail of Spark's format stands here: those belong in ``broker/`` and ``spark/``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millstream.pipelines.errors import CheckpointRefused, EventFailed, Problem, SinkFailed, SpecRefused
    from millstream.pipelines.plan import PipelinePlan, plan
    from millstream.pipelines.replay import replay
    from millstream.pipelines.runner import Runner
    from millstream.pipelines.spec.load import json_schema, load_pipeline, load_pipelines, parse_pipeline
    from millstream.pipelines.spec.pipeline import Pipeline

_WHERE = {
    "CheckpointRefused": "errors",
    "EventFailed": "errors",
    "Pipeline": "spec.pipeline",
    "PipelinePlan": "plan",
    "Problem": "errors",
    "Runner": "runner",
    "SinkFailed": "errors",
    "SpecRefused": "errors",
    "json_schema": "spec.schema",
    "load_pipeline": "spec.load",
    "load_pipelines": "spec.load",
    "parse_pipeline": "spec.load",
    "plan": "plan",
    "replay": "replay",
}


def __getattr__(name: str) -> Any:
    """Imported when asked for: Spark's workers load one small module of this room, and must not wait for the rest."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)


__all__ = [
    "CheckpointRefused",
    "EventFailed",
    "Pipeline",
    "PipelinePlan",
    "Problem",
    "Runner",
    "SinkFailed",
    "SpecRefused",
    "json_schema",
    "load_pipeline",
    "load_pipelines",
    "parse_pipeline",
    "plan",
    "replay",
]
