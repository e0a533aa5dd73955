"""Makes .venv/spark-classes.jsa: Spark's classes as the JVM keeps them in memory, so that each of the tests' many JVMs
starts with half the work. Does nothing if it is there. Where it cannot be made, the tests only start slower."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

ARCHIVE = Path(__file__).parents[1] / ".venv" / "spark-classes.jsa"


def learn(path: Path) -> None:
    """Runs what most tests run, in a JVM that writes the classes it has loaded to ``path`` when it ends."""
    os.environ["SPARK_SUBMIT_OPTS"] = (
        f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xlog:disable -XX:ArchiveClassesAtExit={path}"
    )
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.ui.showConsoleProgress", "false").config("spark.log.level", "OFF").getOrCreate()
    with tempfile.TemporaryDirectory() as where:
        rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).load()
        query = rows.selectExpr("to_json(struct(*)) AS value").writeStream.format("json").trigger(once=True)
        query.option("checkpointLocation", f"{where}/checkpoint").start(f"{where}/rows").awaitTermination()
        spark.range(10).groupBy("id").count().mapInArrow(lambda batches: batches, "id LONG, count LONG").collect()
    gateway = spark.sparkContext._gateway
    jvm = gateway.proc
    spark.stop()
    gateway.shutdown()
    jvm.stdin.close()
    jvm.wait(120)


if __name__ == "__main__" and not ARCHIVE.exists():
    print("setup: keeping Spark's classes for the tests ...", flush=True)
    made = ARCHIVE.with_suffix(f".{os.getpid()}")
    try:
        learn(made)
        made.replace(ARCHIVE)  # in one step: whoever starts meanwhile sees all of it or nothing
    except Exception as error:  # a JVM of another maker may not know how
        print(f"setup: Spark's classes are not kept ({type(error).__name__}: {error}); the tests start slower.")
