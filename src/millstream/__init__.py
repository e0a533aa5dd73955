"""millstream: reliable event streams on Redis, from an embedded broker in one process to a Spark cluster."""

__version__ = "0.1.0"
