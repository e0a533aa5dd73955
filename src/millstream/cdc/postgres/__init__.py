"""PostgreSQL as a source of changes: pgoutput through one replication session that stays open, and chunked snapshots.

Driver: ``session``. Tasks: ``decode`` and ``snapshot``. ``catalog`` has the queries about the database; ``preparation``
checks it and creates the publication and the replication slot.
"""
