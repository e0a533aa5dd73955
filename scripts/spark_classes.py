"""Creates what makes Spark start faster in the tests: .venv/spark-home, and .venv/spark-classes.jsa, an archive of Java
classes for that home.

Does nothing if the archive exists. If it cannot be created, the tests only start more slowly.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

ARCHIVE = Path(__file__).parents[1] / ".venv" / "spark-classes.jsa"
HOME = ARCHIVE.with_name("spark-home")


def create_archive(path: Path) -> None:
    """Run typical test queries in a JVM that writes its loaded classes to ``path`` when it exits."""
    os.environ["SPARK_SUBMIT_OPTS"] = (
        f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xlog:disable -XX:ArchiveClassesAtExit={path}"
    )
    os.environ["SPARK_HOME"] = str(HOME)
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.ui.showConsoleProgress", "false").config("spark.log.level", "OFF").getOrCreate()
    with tempfile.TemporaryDirectory() as directory:
        rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).load()
        query = rows.selectExpr("to_json(struct(*)) AS value").writeStream.format("json").trigger(once=True)
        query.option("checkpointLocation", f"{directory}/checkpoint").start(f"{directory}/rows").awaitTermination()
        spark.range(10).groupBy("id").count().mapInArrow(lambda batches: batches, "id LONG, count LONG").collect()
    gateway = spark.sparkContext._gateway
    jvm = gateway.proc
    spark.stop()
    gateway.shutdown()
    jvm.stdin.close()
    jvm.wait(120)


if __name__ == "__main__" and not ARCHIVE.exists():
    print("setup: creating the class archive of Spark for the tests ...", flush=True)
    temporary = ARCHIVE.with_suffix(f".{os.getpid()}")
    try:
        import pyspark

        from millstream.pipelines.start_cache import make_home

        make_home(HOME, Path(pyspark.__file__).parent)
        create_archive(temporary)
        temporary.replace(ARCHIVE)  # atomic: a JVM that starts meanwhile never sees a partial archive
    except Exception as error:  # JVMs of other vendors may not support it
        print(
            f"setup: the class archive was not created ({type(error).__name__}: {error}); the tests start more slowly."
        )
