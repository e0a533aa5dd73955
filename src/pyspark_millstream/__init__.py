"""Spark imports every top-level ``pyspark_*`` module and registers its ``DefaultSource``: it finds ``redis_streams``.

An exception in here would break that lookup for every data source of the installation, so there is none.
"""

try:
    from millstream.spark.source import RedisStreamsSource

    DefaultSource = RedisStreamsSource
except Exception:  # noqa: BLE001, S110, RUF100 - whatever is missing, other people's data sources must still be found
    pass
