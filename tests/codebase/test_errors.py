"""Every error has one root class, a docstring, and survives pickling with its attributes."""

from __future__ import annotations

import importlib
import inspect
import pickle
import pkgutil

import millstream
from millstream.errors import MillstreamError


def all_errors() -> list[type[MillstreamError]]:
    """Every error class of the packages."""
    for module in pkgutil.walk_packages(millstream.__path__, "millstream."):
        if module.name.endswith("errors"):
            importlib.import_module(module.name)
    errors, remaining = [], [MillstreamError]
    while remaining:
        error = remaining.pop()
        errors.append(error)
        remaining += error.__subclasses__()
    return errors


def test_no_error_shadows_a_builtin() -> None:
    import builtins

    assert not [kind.__name__ for kind in all_errors() if hasattr(builtins, kind.__name__)]


def test_every_error_has_a_docstring() -> None:
    assert not [kind.__name__ for kind in all_errors() if not inspect.getdoc(kind)]


def test_errors_pickle_with_their_attributes() -> None:
    for kind in all_errors():
        error = kind.__new__(kind)
        MillstreamError.__init__(error, "something happened. Do this.", detail=7)
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), copy.detail) == (kind, "something happened. Do this.", 7)
