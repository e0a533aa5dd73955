"""The contract: every method documents the same five properties, matches its operation, and has a blocking form."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from millstream.broker import BlockingBroker, Broker

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "src" / "millstream" / "broker" / "broker.py"
PROPERTIES = re.compile(r"Atomic:\s.+\.\sIdempotent:\s.+\.\sBlocks:\s.+\.\sCancelled:\s.+\.\sRaises:\s.+\.$", re.DOTALL)
BOUND = dict(re.findall(r"@bound_async\(([\w.]+)\)\n    async def (\w+)", PAGE.read_text()))
"""Operation to method."""

methods = sorted(name for name, _ in inspect.getmembers(Broker, inspect.isfunction) if not name.startswith("_"))


@pytest.mark.parametrize("name", methods)
def test_a_method_documents_its_properties(name: str) -> None:
    doc = inspect.cleandoc(getattr(Broker, name).__doc__)

    assert PROPERTIES.search(doc), f"{name}: {doc}"


@pytest.mark.parametrize("operation", BOUND)
def test_a_method_has_the_signature_of_its_operation(operation: str) -> None:
    def parameters(function: Any) -> list[Any]:
        return [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()][1:]

    module, _, name = operation.rpartition(".")
    page = sys.modules["millstream.broker.broker"]
    run = getattr(getattr(page, module) if module else page, name)

    assert parameters(getattr(Broker, BOUND[operation])) == parameters(run)
    returned = inspect.signature(run).return_annotation.removeprefix("Operation[").removesuffix("]")
    assert inspect.signature(getattr(Broker, BOUND[operation])).return_annotation == returned


def test_the_blocking_broker_is_generated_from_the_contract() -> None:
    script = ROOT / "scripts" / "make_blocking.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert methods == sorted(
        name for name, _ in inspect.getmembers(BlockingBroker, inspect.isfunction) if not name.startswith("_")
    )
