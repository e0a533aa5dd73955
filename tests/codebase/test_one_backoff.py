"""Retries use the one ``Backoff``, so that their pauses grow, are bounded and have jitter. Any other pause is listed
here with its reason."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "millstream"
HOME = "model/policies.py"
SLEEPS = ("pause", "sleep", "wait")
PAUSES = ("backoff", "delay", "pause", "rest", "wait")
"""Parts of names that denote a pause."""

GROWN = {
    "messaging/consumer/backlog.py": "1 to 50 ms, while handlers catch up: nothing has failed",
    "messaging/consumer/shard.py": "1 to 50 ms, until an interrupted read has returned: nothing has failed",
}
FIXED = {
    (
        "cdc/mariadb/snapshot.py",
        "read_chunk",
    ): "a table that is being renamed: a few attempts, then it counts as dropped",
    (
        "cdc/postgres/database.py",
        "acknowledge_end",
    ): "until a previous reader has left, 15 s at most: nothing has failed",
    ("cdc/postgres/session.py", "_open_slot"): "until the server notices that a previous reader has left",
    ("dashboard/feed.py", "_read"): "for a page that is open: one read a second, and the page shows the error",
}


def _parsed() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(SOURCE.rglob("*.py")):
        relative = path.relative_to(SOURCE).as_posix()
        if not relative.startswith(("demo/", "testing/")):  # they retry nothing for users
            yield relative, ast.parse(path.read_text())


def _named_as_a_pause(node: ast.expr) -> bool:
    name = ast.unparse(node).lower()
    return isinstance(node, (ast.Name, ast.Attribute)) and any(pause in name for pause in PAUSES)


def _counts_failures(node: ast.expr) -> bool:
    return any(word in ast.unparse(node) for word in ("attempt", "failures", "tries"))


def grown_by_hand(tree: ast.AST) -> Iterator[int]:
    """Lines that make a pause longer: ``pause *= 2``, ``delay = min(delay * 2, limit)``, ``wait_s * 2**tries``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, (ast.Mult, ast.LShift)):
            if _named_as_a_pause(node.target):
                yield node.lineno
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            products = [n for n in ast.walk(node.value) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mult)]
            parts = {ast.unparse(part) for product in products for part in (product.left, product.right)}
            if any(_named_as_a_pause(target) and ast.unparse(target) in parts for target in targets):
                yield node.lineno
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and _counts_failures(node.right):
            yield node.lineno


def _sleeps(node: ast.AST) -> Iterator[ast.Call]:
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and call.args and ast.unparse(call.func).rpartition(".")[2].lstrip("_") in SLEEPS:
            yield call


def paused_after_an_error(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Function and line of each pause in an ``except`` block of a loop that does not come from ``delay_ms``."""
    for function in ast.walk(tree):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for loop in ast.walk(function):
            if not isinstance(loop, (ast.While, ast.For, ast.AsyncFor)):
                continue
            for handler in ast.walk(loop):
                if isinstance(handler, ast.ExceptHandler):
                    for call in _sleeps(handler):
                        if "delay_ms(" not in ast.unparse(call.args[0]):
                            yield function.name, call.lineno


def test_pauses_grow_only_through_backoff():
    grown = {path: line for path, tree in _parsed() if path != HOME for line in grown_by_hand(tree)}
    unlisted = [f"{path}:{line}" for path, line in grown.items() if path not in GROWN]
    assert not unlisted, f"use Backoff, or list it here with a reason: {unlisted}"
    assert not GROWN.keys() - grown.keys(), "listed here, but not in the source"


def test_retries_pause_with_backoff():
    pauses = {(path, name): line for path, tree in _parsed() for name, line in paused_after_an_error(tree)}
    unlisted = [f"{path}:{line} in {name}" for (path, name), line in pauses.items() if (path, name) not in FIXED]
    assert not unlisted, f"use Backoff, or list it here with a reason: {unlisted}"
    assert not FIXED.keys() - pauses.keys(), "listed here, but not in the source"


@pytest.mark.parametrize(
    "code", ["pause *= 2", "self._wait_s = min(self._wait_s * 2, 30)", "sleep(0.1 * 2**attempt)", "delay = delay * 1.5"]
)
def test_checker_finds_a_pause_that_grows_by_hand(code):
    assert list(grown_by_hand(ast.parse(code)))


def test_checker_finds_a_pause_after_an_error():
    code = "def f():\n while True:\n  try:\n   g()\n  except OSError:\n   sleep(1)"
    assert list(paused_after_an_error(ast.parse(code))) == [("f", 6)]
