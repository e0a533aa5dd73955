"""The code in the Spark pages runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from millstream import open_blocking_broker

pytestmark = pytest.mark.spark

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "spark.md"


def test_code_of_the_how_to_page_runs(spark, redis_url, tmp_path):
    with open_blocking_broker(redis_url) as broker:
        broker.xadd_many("orders", [{"event": str(n), "amount": "1.50", "customer": "c"} for n in range(5)])
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    orders = spark.createDataFrame([("eu", "1"), ("us", "2")], "region STRING, value STRING")
    names = {"spark": spark, "orders": orders}
    for block in blocks:
        if "pyspark import pipelines" in block:
            continue  # only runs inside a declarative pipeline: see test_places
        code = block.replace("redis://localhost:6379", redis_url).replace("/data/checkpoints", str(tmp_path))
        exec(compile(code, str(PAGE), "exec"), names)
    assert names["rows"].count() == 5
    names["query"].processAllAvailable()
    names["query"].stop()
    names["write"](orders, 3)
    with open_blocking_broker(redis_url) as broker:
        assert broker.xlen("orders.copy") == 5
        assert [broker.xlen(stream) for stream in ("orders.eu", "orders.us", "out")] == [1, 1, 2]
