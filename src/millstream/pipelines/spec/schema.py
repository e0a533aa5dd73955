"""The JSON schema of the spec, for editors: completion, and red lines while typing."""

from __future__ import annotations

from typing import Any

from millstream.pipelines.spec.pipeline import Pipeline


def json_schema() -> dict[str, Any]:
    schema = Pipeline.model_json_schema(by_alias=True, mode="validation")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "millstream/v1/Pipeline", **schema}
