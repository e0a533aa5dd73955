"""Where in the user's program a function stands: what an error at start names, so that it can be found."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any


def name_of(function: Callable[..., Any]) -> str:
    """A short name: the function's own, or its class's where it is an instance with ``__call__``."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", None) or type(function).__name__


def place_of(function: Callable[..., Any]) -> str:
    """``shop.billing.charge (line 12)``: module, qualified name and, where the source is there, the line."""
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function)
    named = function if hasattr(function, "__qualname__") else type(function)
    where = f"{named.__module__}.{named.__qualname__}"
    code = getattr(function, "__code__", None)
    return f"{where} (line {code.co_firstlineno})" if code is not None else where
