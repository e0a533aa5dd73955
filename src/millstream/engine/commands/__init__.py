"""The command handlers, grouped by data type or purpose. Importing this package registers all of them.

A handler first checks its arguments and the current values, and changes data only after that, so that an error changes
nothing. After a change it calls ``engine.modified``, ``engine.notify`` and ``engine.record``.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
