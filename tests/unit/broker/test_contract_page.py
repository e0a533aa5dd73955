"""docs/contract.md is complete: every operation and every companion key is on it, and its examples run."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from millstream import Broker
from millstream.broker.keys import LEGEND

PAGE = (Path(__file__).parents[3] / "docs" / "contract.md").read_text()


def test_every_operation_is_named() -> None:
    ours = [name for name, _ in inspect.getmembers(Broker, inspect.isfunction) if not name.startswith("_")]

    assert len(ours) > 40
    assert [name for name in ours if f"`{name}`" not in PAGE] == []


def test_every_companion_key_is_named() -> None:
    rows = [f"| `{line.suffix}` | {line.holds} | {line.ends} |" for line in LEGEND]

    assert [row for row in rows if row not in PAGE] == []


def test_examples_run() -> None:
    for example in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(example, "docs/contract.md", "exec"), {"__name__": "__main__"})


def test_generated_method_has_the_signature_of_its_operation() -> None:
    text = str(inspect.signature(Broker.xlen))

    assert text == "(self, stream: 'Name') -> 'int'"
    assert Broker.xlen.__doc__
