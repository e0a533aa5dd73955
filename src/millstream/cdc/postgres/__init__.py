"""PostgreSQL as a source of changes: pgoutput through one session that stays open, snapshots by chunks.

Driver: ``planner`` and ``session``. Tasks: ``decode``, ``snapshot``. What the server is asked stands in ``catalog``;
what is made in it, in ``preparation``.
"""
