"""A small application for each environment of Spark: reads a stream, and writes it with a batch and with a query.

Usage: python spark_app.py '{"url": ..., "checkpoint": ..., "master" | "remote": ..., "spark": {...}}'
"""

from __future__ import annotations

import json
import os
import sys

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)

from pyspark.sql import SparkSession


def main() -> None:
    asked = json.loads(sys.argv[1])
    builder = SparkSession.builder.appName("millstream-app")
    if "remote" in asked:
        builder = builder.remote(asked["remote"])
    elif "master" in asked:
        builder = builder.master(asked["master"]).config("spark.ui.enabled", "false")
    for name, value in asked.get("spark", {}).items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    url = asked["url"]

    rows = spark.read.format("redis_streams").options(url=url, subscribe="in", minPartitions="2").load()
    rows.write.format("redis_streams").mode("append").options(
        url=url, stream="batch_out", txnAppId="app", txnVersion="1"
    ).save()
    source = spark.readStream.format("redis_streams").options(
        url=url, subscribe="in", startingOffsets="earliest", group="spark", maxOffsetsPerTrigger="60"
    )
    writer = source.load().writeStream.format("redis_streams").options(url=url, stream="stream_out")
    query = writer.option("checkpointLocation", asked["checkpoint"]).trigger(availableNow=True).start()
    query.awaitTermination()
    print(json.dumps({"version": spark.version, "rows": rows.count()}), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
