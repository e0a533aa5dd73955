"""The table of ``python -m benchmarks`` on a terminal of 80 columns."""

from __future__ import annotations

import ast
from pathlib import Path

import benchmarks
from benchmarks import Result
from benchmarks.__main__ import table_of
from millstream.cli.show import lay_out


def every_result() -> list[Result]:
    """Each figure that a suite measures, with its own name and unit; values that are inserted at run time have two
    digits."""
    result = []
    for path in Path(benchmarks.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Result" and len(node.args) >= 3:
                name, unit = _text(node.args[0]), _text(node.args[2])
                result.append(Result(name, 1_234_567.0, unit, "the peer", 1_000_000.0, ">= 3.5 x"))
    return result


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) if isinstance(part, ast.Constant) else "42" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "x"


def test_no_unit_is_cut_and_goals_are_shown() -> None:
    results = every_result()
    assert len(results) > 20

    laid = lay_out(*table_of(results), 80)

    assert [line for line in laid.lines() if "…" in line] == []
    assert {"name", "value", "unit", "ratio", "goal", "reached"} <= {column.title for column in laid.columns}
    assert all(len(line) <= 80 for line in laid.lines())
