"""Every example is a pipeline that can be planned, and every YAML in the how-to is one too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from millstream.demo.stage import fill_template
from millstream.pipelines.plan import describe, make_plan
from millstream.pipelines.spec.load import load_pipeline, parse_pipeline

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "examples" / "pipelines").glob("*.yaml"))
PAGES = "".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs/how-to").glob("pipeline*.md")))
BLOCKS = re.findall(r"```yaml\n(apiVersion.*?)```", PAGES, re.DOTALL)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_can_be_planned(path: Path) -> None:
    assert describe(make_plan(load_pipeline(path, {})))


def test_examples_exist() -> None:
    assert EXAMPLES
    assert BLOCKS


@pytest.mark.parametrize("text", BLOCKS)
def test_the_how_to_s_pipelines_can_be_planned(text: str) -> None:
    assert describe(make_plan(parse_pipeline(text, environ={"REDIS_URI": "redis://localhost"})))


URL = "redis://127.0.0.1:6380"
DIRECTORY = Path("/somewhere/wíth 😀: a 'quoted' \"name\"/demo")


def of_the_demo(file: str, url: str = URL) -> str:
    template = (ROOT / "src" / "millstream" / "demo" / file).read_text(encoding="utf-8")
    return fill_template(template, url=url, tag="{demo-1}", rows=900, data=DIRECTORY)


def test_kept_demo_file_can_be_run() -> None:
    pipeline = parse_pipeline(of_the_demo("shop.yaml"), environ={})
    assert pipeline.spec.checkpoint.path == f"{DIRECTORY}/checkpoint"
    reported = describe(make_plan(pipeline))
    assert URL in str(reported)


@pytest.mark.parametrize(
    ("file", "url", "asked"),
    [
        ("shop-postgres.yaml", URL, "DEMO_DSN=..."),
        ("shop.yaml", "redis://:secret@127.0.0.1:6380", "DEMO_URL=..."),
        ("shop-postgres.yaml", "redis://:secret@127.0.0.1:6380", "DEMO_URL=... DEMO_DSN=..."),
    ],
)
def test_kept_demo_file_contains_no_password(file: str, url: str, asked: str) -> None:
    text = of_the_demo(file, url)
    assert "secret" not in text
    assert f"{asked} millstream pipeline run shop.yaml" in text.splitlines()[0]
    options = {"DEMO_URL": url, "DEMO_DSN": "postgresql://shop:secret@127.0.0.1/shop"}
    assert describe(make_plan(parse_pipeline(text, environ=options)))
