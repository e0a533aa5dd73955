"""The ``redis_streams`` data source of Spark: it reads and writes Arrow batches.

Options, offsets, splits and the mapping of rows do no I/O and do not import Spark. Reading consumes
nothing: a batch is a range of ids and can be read again.
"""

from millstream.lazy import lazy_exports

FORMAT = "redis_streams"

# Spark imports this package in short-lived processes of every application.
_names, __getattr__ = lazy_exports(__name__)
__all__ = ["FORMAT", *_names]  # noqa: PLE0604  # the names are strings, which the rule does not see
