"""``pipeline run`` with a store that refuses, or does not answer: it ends, names the store, and writes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

from millstream.testing import RedisProcess, free_port
from support.hadoop_stores import S3Emulation
from support.pipeline_process import PipelineProcess

pytestmark = [pytest.mark.spark, pytest.mark.at_length, pytest.mark.timeout(300)]
NO_CREDENTIALS = {"AWS_EC2_METADATA_DISABLED": "true"}


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Emulation]:
    emulation = S3Emulation(tmp_path_factory.mktemp("s3") / "moto.log")
    emulation.start()
    yield emulation
    emulation.stop()


def refusal(
    directory: Path, server: RedisProcess, location: str, settings: dict[str, str], **environment: str
) -> tuple[int, str]:
    """The exit code and the output of a run with this checkpoint."""
    spec: dict[str, Any] = {
        "source": {"type": "generator", "config": {"rows": 10}},
        "sinks": [{"type": "redis", "config": {"id": "main", "uri": server.url, "stream": "out"}}],
        "retry": {"deadline": "2s"},
        "checkpoint": {"path": location},
        "spark": {"master": "local[2]", "conf": settings},
    }
    document = {"apiVersion": "millstream/v1", "kind": "Pipeline", "metadata": {"name": "refused"}, "spec": spec}
    file = directory / "refused.yaml"
    file.write_text(yaml.safe_dump(document))
    run = PipelineProcess(file, **environment)
    try:
        code, words = run.process.wait(240), run.last_words()
    finally:
        run.kill()
    assert not redis.Redis(port=server.port).exists("out")
    print(f"exit code {code}\n{words}")
    return code, " ".join(words.split())


def test_missing_connector_is_named(redis_server: RedisProcess, tmp_path: Path) -> None:
    code, words = refusal(tmp_path, redis_server, "s3a://bucket/d", {})
    assert code == 1
    assert "s3a://bucket/d" in words
    assert "org.apache.hadoop:hadoop-aws" in words


def test_store_that_never_answers_ends_the_start_after_the_deadline(redis_server: RedisProcess, tmp_path: Path) -> None:
    location = f"hdfs://127.0.0.1:{free_port()}/d"
    code, words = refusal(tmp_path, redis_server, location, {})
    assert code == 1
    assert f"{location}" in words
    assert "does not answer" in words


def test_missing_bucket_of_s3_ends_the_start(s3: S3Emulation, redis_server: RedisProcess, tmp_path: Path) -> None:
    code, words = refusal(tmp_path, redis_server, "s3a://no-such-bucket/d", s3.settings)
    assert code == 1
    assert "s3a://no-such-bucket/d" in words
    assert "bucket" in words


def test_missing_credentials_for_s3_end_the_start(s3: S3Emulation, redis_server: RedisProcess, tmp_path: Path) -> None:
    settings = {name: value for name, value in s3.settings.items() if not name.endswith(".key")}
    code, words = refusal(tmp_path, redis_server, f"{s3.uri}/d", settings, **NO_CREDENTIALS)
    assert code == 1
    assert f"{s3.uri}/d" in words
    assert "credentials" in words
