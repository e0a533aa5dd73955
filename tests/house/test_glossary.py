"""One meaning per word: the glossary is the list, and modules, classes and functions are held to it."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "millstream"
sys.path.insert(0, str(ROOT / "scripts"))

from measure_house import classes_used_twice  # noqa: E402 (it stands beside the product, not in it)

TWICE = {
    "Delivery": "the engine's note in a group's list, as Redis keeps it; the model's is what a reader receives",
    "Group": "the engine's group of Redis; in a twin, what retention's script knows of one",
    "Node": "a server of a cluster; in the engine, a node of the tree that Redis keeps a stream in",
    "Route": "a link's way to a node; messaging's way from a topic to a handler",
}
"""Names that stand twice on purpose, in rooms that never see each other's. Anything else gets a name of its own."""
PLAIN = {"held", "opened"}
"""No names for a module or a class; a function that tells what is held, or gives what it opened, says just that."""


def rows(heading: str) -> list[list[str]]:
    """The rows of the table under a heading of the glossary, as lists of cells."""
    text = (ROOT / "docs" / "glossary.md").read_text()
    part = text.split(f"{heading}\n", 1)[1].split("\n## ", 1)[0]
    cells = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in part.splitlines() if "|" in line]
    return cells[2:]


def words_of(name: str) -> set[str]:
    """``OnceWriter`` and ``once_writer`` are made of the same words."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)}


def test_every_word_is_explained_once() -> None:
    words = [row[0] for row in rows("# Glossary")]
    assert len(words) > 30
    assert sorted(set(words)) == sorted(words)


def names_in(path: Path) -> Iterator[str]:
    """Of a module, its classes and its functions, and of what functions take."""
    yield path.stem
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            taken = node.args
            yield from (node.name, *(one.arg for one in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)))


def test_nothing_is_called_by_a_word_that_was_given_up() -> None:
    given_up = {word: row[1] for row in rows("## Words that we gave up") for word in row[0].split(", ")}
    assert len(given_up) > 10
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        for name in names_in(path):
            plain = PLAIN if name.islower() and name != path.stem else set()
            words = (words_of(name) & given_up.keys()) - plain
            found += [f"{path.relative_to(SOURCE)}: {name}; say {given_up[word]}" for word in words]
    assert not found


def test_no_two_classes_share_a_name_unless_it_says_here_why() -> None:
    product = {
        name: files
        for name, files in classes_used_twice().items()
        if name not in TWICE and not any(file.startswith("testing/") for file in files)
    }
    assert not product
