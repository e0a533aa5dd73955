"""The ``redis_streams`` data source of Spark: what a query asks for enters as options, rows leave as Arrow batches.

Decisions (options, offsets, splits, gaps, mapping of rows) are pure and know no Spark; ``reader``, ``writer`` and
``source`` are the only modules that import pyspark. Nothing here consumes: a batch is a range, and can be read again.
"""

FORMAT = "redis_streams"

__all__ = ["FORMAT"]
