"""Each package's ``__init__`` exports its public API: every name exists and has a docstring or a written meaning."""

from __future__ import annotations

import inspect
import sys
from importlib import import_module

import pytest

PACKAGES = [
    *("assignment", "broker", "cdc", "cqrs", "engine", "messaging", "model", "observe", "pipelines"),
    *("runner", "server", "spark", "testing", "wire"),
]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_exported_name_exists(package: str) -> None:
    module = import_module(f"millstream.{package}")

    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    assert len(set(module.__all__)) == len(module.__all__)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_exported_class_and_function_has_a_docstring(package: str) -> None:
    module = import_module(f"millstream.{package}")
    exported = {name: getattr(module, name) for name in module.__all__}

    assert [
        name
        for name, value in exported.items()
        if (inspect.isclass(value) or inspect.isfunction(value)) and not (value.__doc__ or "").strip()
    ] == []


def test_the_top_level_package_exports_what_exists() -> None:
    module = sys.modules["millstream"]

    assert [name for name in module.__all__ if not hasattr(module, name)] == []
