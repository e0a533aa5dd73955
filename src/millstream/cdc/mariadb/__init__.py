"""MariaDB as a source of changes: the binary log in row format, read through one connection, and chunked snapshots.

Driver: ``session`` and its parser ``binlog``. Tasks: ``decode``, ``rows``, ``values`` and ``snapshot``. ``catalog`` has
the queries about the server; ``preparation`` checks it. MySQL is not supported.
"""
