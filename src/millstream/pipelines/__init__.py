"""Pipelines: YAML enters, is refused whole or becomes a plan, and runs on Spark until its sinks have the events.

What is decided (spec, plan, fingerprints, commit, retries) is pure and needs no Spark; what runs follows the plan.
No Redis command and no detail of Spark's format stands here: those belong in ``broker/`` and ``spark/``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millstream.pipelines.checkpoint import Checkpoint as Checkpoint
    from millstream.pipelines.dead_letters import replay_dead_letters as replay_dead_letters
    from millstream.pipelines.errors import CheckpointRefused as CheckpointRefused
    from millstream.pipelines.errors import EventFailed as EventFailed
    from millstream.pipelines.errors import NoSuchCheckpoint as NoSuchCheckpoint
    from millstream.pipelines.errors import PipelineUnknown as PipelineUnknown
    from millstream.pipelines.errors import Problem as Problem
    from millstream.pipelines.errors import SinkFailed as SinkFailed
    from millstream.pipelines.errors import SinkUnknown as SinkUnknown
    from millstream.pipelines.errors import SourceFailed as SourceFailed
    from millstream.pipelines.errors import SparkNotStarted as SparkNotStarted
    from millstream.pipelines.errors import SpecRefused as SpecRefused
    from millstream.pipelines.errors import short as short
    from millstream.pipelines.plan import PipelinePlan as PipelinePlan
    from millstream.pipelines.plan import describe as describe
    from millstream.pipelines.plan import make_plan as make_plan
    from millstream.pipelines.query import PipelineRun as PipelineRun
    from millstream.pipelines.redis_address import SecretFiles as SecretFiles
    from millstream.pipelines.redis_address import unreachable as unreachable
    from millstream.pipelines.runner import Runner as Runner
    from millstream.pipelines.session import check_parts as check_parts
    from millstream.pipelines.session import java_problem as java_problem
    from millstream.pipelines.session import start_session as start_session
    from millstream.pipelines.session import wanted_master as wanted_master
    from millstream.pipelines.sources import Opening as Opening
    from millstream.pipelines.spec.load import json_schema as json_schema
    from millstream.pipelines.spec.load import load_pipeline as load_pipeline
    from millstream.pipelines.spec.load import load_pipelines as load_pipelines
    from millstream.pipelines.spec.load import parse_pipeline as parse_pipeline
    from millstream.pipelines.spec.pipeline import Pipeline as Pipeline
    from millstream.pipelines.status import PipelineStatus as PipelineStatus
    from millstream.pipelines.status import Tally as Tally
    from millstream.pipelines.status import at_rest as at_rest
    from millstream.pipelines.status import display as display
    from millstream.pipelines.status import slot_facts as slot_facts

_HOMES = {
    "Checkpoint": "checkpoint",
    "CheckpointRefused": "errors",
    "EventFailed": "errors",
    "NoSuchCheckpoint": "errors",
    "Opening": "sources",
    "Pipeline": "spec.pipeline",
    "PipelinePlan": "plan",
    "PipelineRun": "query",
    "PipelineStatus": "status",
    "PipelineUnknown": "errors",
    "Problem": "errors",
    "Runner": "runner",
    "SecretFiles": "redis_address",
    "SinkFailed": "errors",
    "SinkUnknown": "errors",
    "SourceFailed": "errors",
    "SparkNotStarted": "errors",
    "SpecRefused": "errors",
    "at_rest": "status",
    "describe": "plan",
    "Tally": "status",
    "check_parts": "session",
    "display": "status",
    "short": "errors",
    "java_problem": "session",
    "json_schema": "spec.load",
    "load_pipeline": "spec.load",
    "load_pipelines": "spec.load",
    "make_plan": "plan",
    "parse_pipeline": "spec.load",
    "replay_dead_letters": "dead_letters",
    "slot_facts": "status",
    "start_session": "session",
    "unreachable": "redis_address",
    "wanted_master": "session",
}
"""Entered when asked for: Spark's workers load one small module of this room, and must not wait for the rest."""

__all__ = [*_HOMES]  # noqa: PLE0604  # the keys are strings, which the rule does not see


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
