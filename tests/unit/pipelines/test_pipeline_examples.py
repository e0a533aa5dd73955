"""Every example is a pipeline that can be planned, and every YAML in the how-to is one too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from millstream.pipelines.plan import describe, make_plan
from millstream.pipelines.spec.load import load_pipeline, parse_pipeline

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "examples" / "pipelines").glob("*.yaml"))
PAGE = (ROOT / "docs" / "how-to" / "pipelines.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```yaml\n(apiVersion.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_can_be_planned(path: Path) -> None:
    assert describe(make_plan(load_pipeline(path, {})))


def test_there_are_examples() -> None:
    assert EXAMPLES
    assert BLOCKS


@pytest.mark.parametrize("text", BLOCKS)
def test_the_how_to_s_pipelines_can_be_planned(text: str) -> None:
    assert describe(make_plan(parse_pipeline(text, environ={"REDIS_URI": "redis://localhost"})))
