"""Data pipelines: a YAML file is validated, planned, and run on Spark until its required sinks have the events.

What is decided (spec, plan, fingerprints, commits, retries) is pure and needs no Spark. Redis commands belong in
``broker/``, and details of Spark's data source in ``spark/``.
"""

from millstream.lazy import lazy_exports

# Spark's workers import one small module of this package and must not wait for the rest.
_names, __getattr__ = lazy_exports(__name__)
__all__ = [*_names]  # noqa: PLE0604  # the names are strings, which the rule does not see
