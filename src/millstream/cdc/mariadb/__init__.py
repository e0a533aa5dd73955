"""MariaDB as a source of changes: its binary log in row format, read by one connection; snapshots by chunks.

Driver: ``session`` and what it parses (``binlog``). Tasks: ``decode``, ``rows``, ``values`` and
``snapshot``. What the server is asked stands in ``catalog``; what it must be, in ``preparation``. MySQL is not claimed.
"""
