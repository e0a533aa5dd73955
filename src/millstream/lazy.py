"""Packages whose public names are imported on first use, because importing all of them would be slow.

Such a package lists each name once, in its ``__init__.pyi``, as ``from module import Name as Name``. Type checkers read
that file; ``lazy_exports`` reads it at run time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazy_exports(package: str) -> tuple[list[str], Callable[[str], Any]]:
    """``__all__`` and ``__getattr__`` of a package, from its stub file. The stub may also be inside a zip archive."""
    module = sys.modules[package]
    spec = module.__spec__
    assert spec is not None
    assert spec.origin is not None
    assert spec.loader is not None
    stub = spec.loader.get_data(spec.origin.removesuffix("c").removesuffix(".py") + ".pyi").decode()  # type: ignore[attr-defined]  # every loader of files and archives has it
    homes: dict[str, str] = {}
    for line in stub.splitlines():
        if line.startswith("from ") and " as " in line:
            _, home, _, name, *_ = line.split()
            homes[name] = home

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(homes[name]), name)
        setattr(module, name, value)
        return value

    return sorted(homes), load
