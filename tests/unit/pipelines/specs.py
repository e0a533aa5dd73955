"""Specs for tests: a small one, changed as a test needs it."""

from __future__ import annotations

from typing import Any

from millstream.pipelines.plan import PipelinePlan, make_plan
from millstream.pipelines.spec.pipeline import Pipeline

URI = "redis://127.0.0.1:1"


def redis_sink(name: str = "main", **config: Any) -> dict[str, Any]:
    return {"type": "redis", "config": {"id": name, "uri": URI, "stream": "out", **config}}


def pipeline(name: str = "orders", tenant: str = "default", **spec: Any) -> Pipeline:
    whole = {"source": {"type": "generator", "config": {"rows": 10}}, "sinks": [redis_sink()], **spec}
    head = {"apiVersion": "millstream/v1", "kind": "Pipeline", "metadata": {"name": name, "tenant": tenant}}
    return Pipeline.model_validate({**head, "spec": whole})


def planned(**spec: Any) -> PipelinePlan:
    return make_plan(pipeline(**spec))
