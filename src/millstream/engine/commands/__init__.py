"""The handlers, one module for each kind of thing. Importing this package registers all of them.

A handler checks its words, reads, decides, and only then changes: an error leaves everything as it was. After a change
it says ``engine.modified``, ``engine.notify`` and ``engine.record``.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
