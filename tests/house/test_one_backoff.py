"""One backoff for all: what failed is tried again after a pause that ``Backoff`` tells, so that pauses grow, are
bounded, and are never in step. Any other pause is listed here, with its reason."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "millstream"
HOME = "model/policies.py"
SLEEPS = ("pause", "sleep", "wait")
PAUSES = ("backoff", "delay", "pause", "rest", "wait")
"""What a pause is called, as a part of a name."""

GROWN = {
    "messaging/subscriber/reader.py": "1 to 50 ms, while handlers catch up: nothing has failed",
    "messaging/subscriber/shard.py": "1 to 50 ms, until a read that was called back has come: nothing has failed",
}
FIXED = {
    ("cdc/mariadb/snapshot.py", "read_chunk"): "a table that is being renamed: a few looks, then it counts as dropped",
    ("cdc/postgres/database.py", "acknowledge_end"): "for a reader that is going, 15 s at most: nothing has failed",
    ("cdc/postgres/session.py", "_opened"): "for a reader that is going, as long as the server may take to notice",
    ("dashboard/feed.py", "_read"): "for people who watch a page: one read a second, and the page tells why",
}


def _parsed() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(SOURCE.rglob("*.py")):
        relative = path.relative_to(SOURCE).as_posix()
        if not relative.startswith(("bench/", "demo/", "testing/")):  # which retry nothing for users
            yield relative, ast.parse(path.read_text())


def _named_as_a_pause(node: ast.expr) -> bool:
    words = ast.unparse(node).lower()
    return isinstance(node, (ast.Name, ast.Attribute)) and any(one in words for one in PAUSES)


def _counts_failures(node: ast.expr) -> bool:
    return any(word in ast.unparse(node) for word in ("attempt", "failures", "tries"))


def grown_by_hand(tree: ast.AST) -> Iterator[int]:
    """Lines that make a pause longer: ``pause *= 2``, ``delay = min(delay * 2, most)``, ``wait_s * 2**tries``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, (ast.Mult, ast.LShift)):
            if _named_as_a_pause(node.target):
                yield node.lineno
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            grown = [one for one in ast.walk(node.value) if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Mult)]
            parts = {ast.unparse(part) for one in grown for part in (one.left, one.right)}
            if any(_named_as_a_pause(target) and ast.unparse(target) in parts for target in targets):
                yield node.lineno
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and _counts_failures(node.right):
            yield node.lineno


def _sleeps(node: ast.AST) -> Iterator[ast.Call]:
    for one in ast.walk(node):
        if isinstance(one, ast.Call) and one.args and ast.unparse(one.func).rpartition(".")[2].lstrip("_") in SLEEPS:
            yield one


def paused_after_an_error(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """The function and the line of each pause in a handler of errors, inside of a loop, that no ``delay_ms`` tells."""
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


def test_no_pause_is_grown_by_hand():
    found = {path: line for path, tree in _parsed() if path != HOME for line in grown_by_hand(tree)}
    unlisted = [f"{path}:{line}" for path, line in found.items() if path not in GROWN]
    assert not unlisted, f"use Backoff, or list it here with a reason: {unlisted}"
    assert not GROWN.keys() - found.keys(), "listed, and not there any more"


def test_what_failed_is_tried_again_after_a_pause_of_the_one_backoff():
    found = {(path, name): line for path, tree in _parsed() for name, line in paused_after_an_error(tree)}
    unlisted = [f"{path}:{line} in {name}" for (path, name), line in found.items() if (path, name) not in FIXED]
    assert not unlisted, f"use Backoff, or list it here with a reason: {unlisted}"
    assert not FIXED.keys() - found.keys(), "listed, and not there any more"


@pytest.mark.parametrize(
    "code", ["pause *= 2", "self._wait_s = min(self._wait_s * 2, 30)", "sleep(0.1 * 2**attempt)", "delay = delay * 1.5"]
)
def test_a_pause_that_is_grown_by_hand_is_found(code):
    assert list(grown_by_hand(ast.parse(code)))


def test_a_pause_after_an_error_is_found():
    code = "def f():\n while True:\n  try:\n   g()\n  except OSError:\n   sleep(1)"
    assert list(paused_after_an_error(ast.parse(code))) == [("f", 6)]
