"""Delta, Kafka and Spark's connector to it, from their published artefacts: fetched once by Maven, if it is there."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "millstream-tests"

DELTA = {"io.delta:delta-spark_4.2_2.13": "4.4.0"}
KAFKA = {"org.apache.kafka:kafka_2.13": "4.1.2"}
CONNECTOR = {
    "org.apache.spark:spark-sql-kafka-0-10_2.13": "4.2.0",
    "org.apache.spark:spark-token-provider-kafka-0-10_2.13": "4.0.0",
    "org.apache.kafka:kafka-clients": "4.1.2",
    "org.apache.commons:commons-pool2": "2.12.1",
}
"""Each for Spark 4.2. The token provider's later versions are not everywhere, and its interface is the same."""

_POM = """<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>
<groupId>millstream</groupId><artifactId>tests</artifactId><version>1</version><dependencies>{}</dependencies></project>"""
_ONE = """<dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version>
<exclusions>{}</exclusions></dependency>"""
_SPARKS_OWN = "".join(
    f"<exclusion><groupId>{group}</groupId><artifactId>*</artifactId></exclusion>"
    for group in (
        "org.apache.spark",
        "org.apache.hadoop",
        "org.apache.parquet",
        "com.fasterxml.jackson.core",
        "org.slf4j",
    )
)


def jars(name: str, wanted: dict[str, str], *, for_spark: bool = True) -> list[Path]:
    """The artefacts and their dependencies, without those that Spark contains. Skips if they cannot be fetched."""
    location = CACHE / f"{name}-{'-'.join(wanted.values())}"
    if not (location / "ready").exists():
        if shutil.which("mvn") is None:
            pytest.skip("Maven is not installed, so there is no Delta and no Kafka to run against")
        shutil.rmtree(location, ignore_errors=True)
        location.mkdir(parents=True)
        ones = [
            _ONE.format(*key.split(":"), version, _SPARKS_OWN if for_spark else "") for key, version in wanted.items()
        ]
        (location / "pom.xml").write_text(_POM.format("".join(ones)))
        words = ["mvn", "-q", "-B", "dependency:copy-dependencies", "-DoutputDirectory=jars", "-DincludeScope=runtime"]
        done = subprocess.run(words, cwd=location, capture_output=True, text=True, timeout=500, check=False)
        if done.returncode:
            pytest.skip(f"Maven cannot fetch {', '.join(wanted)}: {done.stdout.strip().splitlines()[:1]}")
        (location / "ready").touch()
    brought = ("scala-library", "log4j", "slf4j", "lz4", "zstd", "snappy", "jsr305") if for_spark else ()
    return sorted(jar for jar in (location / "jars").glob("*.jar") if not jar.name.startswith(brought or "\0"))
