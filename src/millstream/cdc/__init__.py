"""Change data capture as Spark sources: reads a database's log and returns Arrow batches of change events.

This package does not use Redis. Only readers and sources import ``pyspark``. A log position is acknowledged to the
database after its batch is finished, never before.

``database`` is the interface of a database; ``postgres`` and ``mariadb`` implement it. The rest is shared: the
read-ahead log of a session (``read_ahead``, ``segments``), the planning of batches (``planner``, ``offsets``), snapshot
chunks (``snapshot``), decoding to Arrow (``decoding``, ``json_columns``), and Spark's side (``reader``, ``source``).
"""

POSTGRES_FORMAT = "postgres_changes"
MARIADB_FORMAT = "mariadb_changes"

__all__ = ["MARIADB_FORMAT", "POSTGRES_FORMAT"]
