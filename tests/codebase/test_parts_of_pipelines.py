"""A new source or sink of pipelines is one file and one line in a list; no other file needs to know it."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
PIPELINES = SOURCE / "millstream" / "pipelines"

SINK = '''
"""A sink that discards every row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from millstream.pipelines.sinks.sink import Sink, SinkConfig, Write
from millstream.pipelines.spec.part import TemplateText
from millstream.pipelines.redis_address import RedisAddress, RedisUri

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


class NowhereConfig(SinkConfig):
    uri: RedisUri = Field(repr=False)
    label: TemplateText


class NowhereSink(Sink):
    type: Literal["nowhere"]
    config: NowhereConfig

    def addresses(self) -> Iterator[RedisAddress]:
        yield RedisAddress(self.config.uri)

    def templates(self) -> Iterator[tuple[tuple[str | int, ...], str]]:
        yield ("config", "label"), self.config.label

    def prepare(self, events: DataFrame, tenant: str, keep: Sequence[Column] = ()) -> DataFrame:
        return events

    def write(self, rows: DataFrame, write: Write) -> None:
        rows.count()
'''

SOURCE_PART = '''
"""A source without rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from millstream.pipelines.sources.source import Opening, Source, SourceConfig

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class SilenceConfig(SourceConfig):
    seconds: int = 1


class SilenceSource(Source):
    type: Literal["silence"]
    config: SilenceConfig
    bounds = frozenset()

    def open(self, session: SparkSession, opening: Opening) -> DataFrame:
        raise NotImplementedError

    def fields(self) -> dict[str, frozenset[str]]:
        return {"quiet": frozenset({"id"})}

    def order(self) -> str | None:
        return "the only one"

    def identity(self) -> dict[str, Any]:
        return {"seconds": self.config.seconds}
'''

PROGRAM = '''
import json, sys
from millstream.pipelines import SpecRefused, json_schema, parse_pipeline
from millstream.pipelines.plan import make_plan
from millstream.pipelines.checkpoint import fingerprint
from millstream.pipelines.plan import describe
from millstream.pipelines.redis_address import SecretFiles, unreachable

SPEC = """
apiVersion: millstream/v1
kind: Pipeline
metadata: {name: n}
spec:
  source: {type: silence, config: {seconds: 2}}
  sinks: [{type: nowhere, config: {id: a, uri: "redis://:s3cret@127.0.0.1:1", label: "${after.id}"}}]
"""
made = make_plan(parse_pipeline(SPEC))
try:
    parse_pipeline(SPEC.replace("after.id", "after.nothing").replace("sinks:", "batch: {max_events: 5}\\n  sinks:"))
    refused = []
except SpecRefused as error:
    refused = [problem.path for problem in error.problems]
print(json.dumps({
    "plan": dict(describe(made)),
    "fingerprint": sorted(fingerprint(made)["sinks"]),
    "schema": "NowhereSink" in str(json_schema()) and "SilenceSource" in str(json_schema()),
    "refused": refused,
    "addresses": [where for where, _ in made.addresses()],
    "unreachable": [where for where, _ in unreachable(made.addresses(), "spark://h:1")],
    "options": sorted(SecretFiles().options(next(made.addresses())[1])),
}))
'''


def test_a_sink_and_a_source_are_one_file_and_one_line_each(tmp_path: Path) -> None:
    shutil.copytree(SOURCE, tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    package = tmp_path / "src" / "millstream" / "pipelines"
    (package / "sinks" / "nowhere.py").write_text(SINK)
    (package / "sources" / "silence.py").write_text(SOURCE_PART)
    for kind, line in (("sinks", '"nowhere.NowhereSink",'), ("sources", '"silence.SilenceSource",')):
        listing = package / kind / "__init__.py"
        before = listing.read_text()
        anchor = f'        "redis.Redis{kind[:-1].capitalize()}",\n'
        assert anchor in before
        listing.write_text(before.replace(anchor, f"{anchor}        {line}\n"))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["plan"]["source"].startswith("silence")
    assert report["plan"]["sink a"].startswith("nowhere")
    assert report["plan"]["order"] == "kept: the only one, in every sink"
    assert "redis://:***@127.0.0.1:1" in report["plan"]["dead letters"], "the default is the first Redis of the spec"
    assert report["fingerprint"] == ["a"]
    assert report["schema"]
    assert sorted(report["refused"]) == ["spec.batch.max_events", "spec.sinks[0].config.label"]
    assert report["addresses"] == report["unreachable"] == ["sink a", "dlq"]
    assert report["options"] == ["urlFile"], "Spark does not receive the password"


def test_code_does_not_branch_on_the_class_of_a_source_or_sink() -> None:
    """Sources and sinks differ by their methods. No ``isinstance`` selects one of them."""
    checks = []
    for path in PIPELINES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
                classes = {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)}
                checks += [f"{path.name}: {name}" for name in classes if name.endswith(("Sink", "Source"))]
    # Redis sinks that write equal rows share one write, so they look for other Redis sinks.
    assert checks == ["redis.py: RedisSink"]
