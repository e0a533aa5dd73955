"""``import millstream`` and an embedded broker import no Redis client, no Spark and no YAML."""

from __future__ import annotations

import subprocess
import sys


def loaded_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(' '.join(sys.modules))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return {name.split(".")[0] for name in printed.split()}


def test_importing_the_package_needs_neither_redis_nor_spark_nor_yaml() -> None:
    heavy = {"redis", "pyspark", "yaml", "pydantic", "starlette", "typer", "rich", "prometheus_client"}
    assert not heavy & loaded_by("import millstream")


def test_an_embedded_broker_needs_neither_redis_nor_spark_nor_yaml() -> None:
    heavy = {"redis", "pyspark", "yaml", "pydantic", "starlette", "typer", "rich"}
    assert not heavy & loaded_by(
        "from millstream import open_blocking_broker; b = open_blocking_broker('local://'); b.xadd('s', {'a': 1})"
    )


def test_the_spark_shim_can_be_imported() -> None:
    assert "pyspark_millstream" in loaded_by("import pyspark_millstream")
