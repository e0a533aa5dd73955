"""The stream broker: one contract over an embedded engine or Redis; ``open_broker(url)`` selects which.

Calls take plain Python values and return the values of ``model/``, or raise typed errors. Each operation is implemented
once and runs over both transports, blocking or asyncio.
"""

from millstream.lazy import lazy_exports

# The engine, and the client of Redis, are imported only when they are used.
_names, __getattr__ = lazy_exports(__name__)
__all__ = [*_names]  # noqa: PLE0604  # the names are strings, which the rule does not see
