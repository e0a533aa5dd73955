"""Metrics, health and readiness of services and pipelines, and the diagnosis behind ``millstream doctor``.

Input are observer events, through the protocol in ``model``. Nothing here changes what it observes, and no text of an
error becomes a label.
"""

from millstream.lazy import lazy_exports

# A diagnosis on the command line needs no HTTP server.
_names, __getattr__ = lazy_exports(__name__)
__all__ = [*_names]  # noqa: PLE0604  # the names are strings, which the rule does not see
