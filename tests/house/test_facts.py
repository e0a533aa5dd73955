"""Every fact that a room tells is in the reference, with what it carries, and counted; the reference tells no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from millstream.observe.service_metrics import MEANINGS

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "millstream"
PAGE = ROOT / "docs" / "reference" / "facts.md"
TELLERS = {"tell", "_tell", "observer", "_observer"}


def told_in(tree: ast.Module) -> Iterator[tuple[str, set[str]]]:
    """Facts told in a module, with the keywords of each telling. A name stands for the constant that it was given."""
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _last_name(node.func) in TELLERS and node.args:
            first = node.args[0]
            name = constants.get(first.id) if isinstance(first, ast.Name) else getattr(first, "value", None)
            if isinstance(name, str):
                yield name, {keyword.arg for keyword in node.keywords if keyword.arg is not None}


def _last_name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def told() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for name, keywords in told_in(ast.parse(path.read_text())):
            found.setdefault(name, set()).update(keywords)
    return found


def documented() -> dict[str, str]:
    return dict(re.findall(r"^\| `([a-z]+\.[a-z_]+)` (\|.*)$", PAGE.read_text(), re.MULTILINE))


def test_the_collector_sees_constants_attributes_and_plain_names() -> None:
    tree = ast.parse(
        "A = 'room.a'\nobserver(A, x=1)\nself.desk.tell('room.b', y=2)\nself._tell(f(), z=3)\nother('room.c')\n"
    )
    assert dict(told_in(tree)) == {"room.a": {"x"}, "room.b": {"y"}}


def test_facts_are_named_after_their_room() -> None:
    assert len(told()) > 40
    assert not [name for name in told() if not re.fullmatch(r"[a-z]+\.[a-z_]+", name)]


def test_every_fact_has_a_line_in_the_reference_and_every_line_a_fact() -> None:
    assert set(documented()) == set(told())


def test_the_reference_names_what_each_fact_carries() -> None:
    lines = documented()
    missing = [
        f"{name}: {keyword}"
        for name, keywords in told().items()
        for keyword in sorted(keywords)
        if f"`{keyword}`" not in lines[name]
    ]
    assert not missing


def test_every_fact_of_a_service_is_counted() -> None:
    of_services = {name for name in told() if name.split(".")[0] in ("broker", "messaging", "assignment")}
    assert set(MEANINGS) == of_services
