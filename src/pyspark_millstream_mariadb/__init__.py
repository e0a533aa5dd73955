"""Spark registers one ``DefaultSource`` of each top-level ``pyspark_*`` module: this one brings ``mariadb_changes``.

An exception in here would break that lookup for every data source of the installation, so there is none.
"""

try:
    from millstream.cdc.source import MariadbChangesSource

    DefaultSource = MariadbChangesSource
except Exception as error:
    import logging

    logging.getLogger("millstream.cdc").warning("mariadb_changes is not available: %s: %s", type(error).__name__, error)
