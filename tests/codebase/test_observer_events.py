"""The reference of observer events matches the source: every event with its details, and no other event."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from millstream.observe.service_metrics import MEANINGS

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "millstream"
PAGE = ROOT / "docs" / "reference" / "events.md"
EMITTERS = {"emit", "_emit", "_tell", "observer", "_observer"}


def events_in(tree: ast.Module) -> Iterator[tuple[str, set[str]]]:
    """Events that a module emits, with the keywords of each call. A name is replaced by its module-level constant."""
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _last_name(node.func) in EMITTERS and node.args:
            first = node.args[0]
            name = constants.get(first.id) if isinstance(first, ast.Name) else getattr(first, "value", None)
            if isinstance(name, str):
                yield name, {keyword.arg for keyword in node.keywords if keyword.arg is not None}


def _last_name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def emitted_events() -> dict[str, set[str]]:
    events: dict[str, set[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for name, keywords in events_in(ast.parse(path.read_text())):
            events.setdefault(name, set()).update(keywords)
    return events


def documented() -> dict[str, str]:
    return dict(re.findall(r"^\| `([a-z]+\.[a-z_]+)` (\|.*)$", PAGE.read_text(), re.MULTILINE))


def test_events_are_found_by_constant_attribute_and_plain_name() -> None:
    tree = ast.parse(
        "A = 'pkg.a'\nobserver(A, x=1)\nself.topic.emit('pkg.b', y=2)\nself._emit(f(), z=3)\nother('pkg.c')\n"
    )
    assert dict(events_in(tree)) == {"pkg.a": {"x"}, "pkg.b": {"y"}}


def test_events_are_named_after_their_package() -> None:
    assert len(emitted_events()) > 40
    assert not [name for name in emitted_events() if not re.fullmatch(r"[a-z]+\.[a-z_]+", name)]


def test_reference_lists_exactly_the_emitted_events() -> None:
    assert set(documented()) == set(emitted_events())


def test_reference_lists_the_details_of_each_event() -> None:
    lines = documented()
    missing = [
        f"{name}: {keyword}"
        for name, keywords in emitted_events().items()
        for keyword in sorted(keywords)
        if f"`{keyword}`" not in lines[name]
    ]
    assert not missing


def test_every_event_of_a_service_is_counted() -> None:
    service_events = {name for name in emitted_events() if name.split(".")[0] in ("broker", "messaging", "assignment")}
    assert set(MEANINGS) == service_events
