"""Measures how the house reads: files, lines of code, small files, deep imports, class names used twice.

``python scripts/measure_house.py [SRC]`` prints a table; ``tests/house/test_measures.py`` holds most lines of it.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = "millstream"
SOURCE = Path(__file__).parents[1] / "src" / PACKAGE
SMALL = 30
"""A file with less code than this needs a reason, or a neighbour to join."""
KIT = "testing/conformance"
"""The kit is a suite of tests that users run: it does not count as code of the product."""


class Import(NamedTuple):
    """One import of a module of ours from another room."""

    file: str
    module: str


def python_files(source: Path = SOURCE) -> list[Path]:
    return sorted(path for path in source.rglob("*.py"))


def room_of(dotted: str) -> str:
    """``millstream.broker.links.link`` is in the room ``broker``."""
    parts = dotted.split(".")
    return parts[1] if len(parts) > 1 else ""


def code_lines(path: Path) -> int:
    """Lines with code on them: no blanks, no comments, no docstrings."""
    text = path.read_text()
    passed_over: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            passed_over.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    nothing = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in nothing:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - passed_over)


def imports(source: Path = SOURCE) -> Iterator[Import]:
    """What the rooms import from other rooms, one for each import statement."""
    for path in python_files(source):
        own = room_of(".".join((PACKAGE, *path.relative_to(source).with_suffix("").parts)))
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else []
            )
            for name in names:
                if name.split(".")[0] == PACKAGE and room_of(name) != own:
                    yield Import(str(path.relative_to(source)), name)


def is_deep(module: str) -> bool:
    """Whether an import passes a room's door: ``millstream.broker`` does not, ``millstream.broker.keys`` does."""
    return module.count(".") > 1


def classes_used_twice(source: Path = SOURCE) -> dict[str, list[str]]:
    """Names of public classes that stand in more than one file."""
    where: dict[str, list[str]] = defaultdict(list)
    for path in python_files(source):
        if path.is_relative_to(source / KIT):
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].append(str(path.relative_to(source)))
    return {name: files for name, files in sorted(where.items()) if len(files) > 1}


def main() -> None:
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCE
    lines = {path: code_lines(path) for path in python_files(source)}
    product = sum(count for path, count in lines.items() if not path.is_relative_to(source / KIT))
    small = [path for path, count in lines.items() if count < SMALL and path.name != "__init__.py"]
    crossing = list(imports(source))
    deep = sum(is_deep(one.module) for one in crossing)
    twice = classes_used_twice(source)
    for what, value in (
        ("files", len(lines)),
        ("lines of code", sum(lines.values())),
        ("lines of code without the kit", product),
        (f"files under {SMALL} lines of code", len(small)),
        ("imports through a room's door", len(crossing) - deep),
        ("imports past a room's door", deep),
        ("class names used twice", len(twice)),
    ):
        print(f"{what:36} {value:>7,}")
    for name, files in twice.items():
        print(f"  {name}: {', '.join(files)}")


if __name__ == "__main__":
    main()
