"""For tests: a pytest plugin, waiting helpers, servers, a faulty transport, delivery ledgers, the conformance kit.

The kit is in ``millstream.testing.conformance`` and needs pytest; everything else needs only this package.
"""

from millstream.lazy import lazy_exports

# pytest loads our plugin from this package at every start, and only that.
_names, __getattr__ = lazy_exports(__name__)
__all__ = [*_names]  # noqa: PLE0604  # the names are strings, which the rule does not see
