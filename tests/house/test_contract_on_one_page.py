"""The contract's page: every method says the same five things, is what its operation is, and is there for threads."""

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
PROMISES = re.compile(r"Atomic:\s.+\.\sIdempotent:\s.+\.\sBlocks:\s.+\.\sCancelled:\s.+\.\sRaises:\s.+\.$", re.DOTALL)
BOUND = dict(re.findall(r"@bound_async\(([\w.]+)\)\n    async def (\w+)", PAGE.read_text()))
"""Operation to method."""

methods = sorted(name for name, _ in inspect.getmembers(Broker, inspect.isfunction) if not name.startswith("_"))


def test_it_is_one_page() -> None:
    assert 40 <= len(methods) <= 51, "what one room alone needs is a step that it runs, not a method"
    assert len(PAGE.read_text().splitlines()) < 450


@pytest.mark.parametrize("name", methods)
def test_a_method_says_what_it_promises(name: str) -> None:
    said = inspect.cleandoc(getattr(Broker, name).__doc__)

    assert PROMISES.search(said), f"{name}: {said}"


@pytest.mark.parametrize("operation", BOUND)
def test_a_method_is_declared_as_its_operation_is(operation: str) -> None:
    def parameters(function: Any) -> list[Any]:
        return [(one.name, one.kind, one.default) for one in inspect.signature(function).parameters.values()][1:]

    room, _, name = operation.rpartition(".")
    page = sys.modules["millstream.broker.broker"]
    run = getattr(getattr(page, room) if room else page, name)

    assert parameters(getattr(Broker, BOUND[operation])) == parameters(run)
    returned = inspect.signature(run).return_annotation.removeprefix("Conversation[").removesuffix("]")
    assert inspect.signature(getattr(Broker, BOUND[operation])).return_annotation == returned


def test_the_broker_for_threads_is_made_from_the_page() -> None:
    script = ROOT / "scripts" / "make_blocking.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert methods == sorted(
        name for name, _ in inspect.getmembers(BlockingBroker, inspect.isfunction) if not name.startswith("_")
    )
