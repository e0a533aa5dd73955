"""millstream: reliable event streams on Redis, from an embedded broker in one process to a Spark cluster."""

from millstream.lazy import lazy_exports

__version__ = "0.2.0"

# Importing the package loads none of its parts: each is imported with the first name that needs it.
_names, __getattr__ = lazy_exports(__name__)
__all__ = ["__version__", *_names]  # noqa: PLE0604  # the names are strings, which the rule does not see


def __dir__() -> list[str]:
    return sorted([*globals(), *_names])
