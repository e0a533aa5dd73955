"""Spark imports every top-level ``pyspark_*`` module and registers its ``DefaultSource``: it finds ``redis_streams``.

An exception in here would break that lookup for every data source of the installation, so there is none.
"""

try:
    from millstream.spark.source import RedisStreamsSource

    DefaultSource = RedisStreamsSource
except Exception as error:
    import logging

    logging.getLogger("millstream.spark").warning("redis_streams is not available: %s: %s", type(error).__name__, error)
