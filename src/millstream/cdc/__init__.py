"""Changes of databases as Spark sources: a database's log enters, an Arrow frame of changes leaves.

Nothing here knows Redis; ``pyspark`` is imported by readers and sources alone. A position is acknowledged to the
database when its batch is finished, never before.

What a second database must bring, beside the frame that all share (``segments``, ``spool``, ``offsets``, ``frame``,
``json_columns``, ``lanes``): a session, that is a thread which appends raw messages to the spool, tells it where
transactions end (``commit``) and how far the log is known (``reach``), and acknowledges; a decoder from a segment to
the frame; positions as whole numbers that grow along the log; chunks of a snapshot that are pinned as segments and know
which changes they saw; a reader and a source for Spark.
"""

POSTGRES_FORMAT = "postgres_changes"

__all__ = ["POSTGRES_FORMAT"]
