"""Every error of the house hangs under one root, pickles, and says what to do."""

from __future__ import annotations

import importlib
import inspect
import pickle
import pkgutil

import millstream
from millstream.errors import MillstreamError


def all_errors() -> list[type[MillstreamError]]:
    """Every error class that a room defines."""
    for module in pkgutil.walk_packages(millstream.__path__, "millstream."):
        if module.name.endswith("errors"):
            importlib.import_module(module.name)
    found, waiting = [], [MillstreamError]
    while waiting:
        kind = waiting.pop()
        found.append(kind)
        waiting += kind.__subclasses__()
    return found


def test_errors_have_no_builtins_name() -> None:
    import builtins

    assert not [kind.__name__ for kind in all_errors() if hasattr(builtins, kind.__name__)]


def test_errors_explain_themselves() -> None:
    assert not [kind.__name__ for kind in all_errors() if not inspect.getdoc(kind)]


def test_errors_pickle_with_their_facts() -> None:
    for kind in all_errors():
        error = kind.__new__(kind)
        MillstreamError.__init__(error, "something happened. Do this.", fact=7)
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), again.fact) == (kind, "something happened. Do this.", 7)
