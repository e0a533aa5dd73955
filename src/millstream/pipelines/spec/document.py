"""Converts YAML text to plain values with their lines. Limits size, depth and aliases; refuses tags and duplicate keys.

``${VAR}`` and ``${VAR:-default}`` are replaced from the environment; references of templates are not."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from millstream.pipelines.errors import Problem, SpecRefused

_USE = re.compile(r"\$\{([^{}]*)\}")
_ROOTS = ("source", "before", "after", "row")
_WORDS = ("op", "id", "key", "tenant_id")


def is_reference(name: str) -> bool:
    """Whether ``name`` in ``${name}`` is a part of the event, and not an environment variable."""
    return name in _WORDS or name.partition(".")[0] in _ROOTS


def expand(text: str, environ: Mapping[str, str]) -> tuple[str, list[str]]:
    """``text`` with its variables replaced, and the names of variables that are not set."""
    missing: list[str] = []

    def value(match: re.Match[str]) -> str:
        inner = match.group(1)
        if is_reference(inner):
            return match.group(0)
        name, has_default, default = inner.partition(":-")
        variable = environ.get(name)
        if variable is None or (has_default and not variable):
            if has_default:
                return default
            missing.append(name)
            return ""
        return variable

    return _USE.sub(value, text), missing


MAX_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_NODES = 20_000
MAX_NUMBER = 100

DocumentPath = tuple[str | int, ...]


@dataclass(slots=True)
class Document:
    """``value`` is the YAML's value with variables replaced. ``lines`` has the line of each path."""

    file: str
    value: Any = None
    lines: dict[DocumentPath, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    from_environment: set[DocumentPath] = field(default_factory=set)

    def line(self, path: DocumentPath) -> int:
        """The line of ``path``, or of its nearest parent in the file."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.lines:
                return self.lines[path[:length]]
        return 1

    def report(self, path: DocumentPath, message: str) -> None:
        self.problems.append(Problem(self.file, self.line(path), dotted(path), message))


def dotted(path: DocumentPath) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def parse(text: str, file: str, environ: Mapping[str, str]) -> Document:
    """Reads one YAML document. Raises SpecRefused if it is not YAML or exceeds a limit. Problems of values (an unset
    variable, a duplicate key) are collected in ``problems``, so that one error can report all of them."""
    document = Document(file)
    if len(text.encode(errors="surrogatepass")) > MAX_BYTES:
        raise SpecRefused([Problem(file, 1, "", f"the file is larger than {MAX_BYTES} bytes")])
    try:
        _check_depth(text, file)
        nodes = list(yaml.compose_all(text, Loader=yaml.SafeLoader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(part for part in (error.context, error.problem) if part)
        problem += _hint(text, mark.line) if mark else ""
        raise SpecRefused([Problem(file, mark.line + 1 if mark else 1, "", f"this is not YAML: {problem}")]) from error
    except yaml.YAMLError as error:
        raise SpecRefused([Problem(file, 1, "", f"this is not YAML: {error}")]) from error
    if len(nodes) != 1 or nodes[0] is None:
        raise SpecRefused([Problem(file, 1, "", f"one YAML document is expected, not {len(nodes)}")])
    document.value = _Reader(document, environ).read(nodes[0], ())
    return document


def _hint(text: str, line: int) -> str:
    """A hint for ``${NAME}`` without quotes, which is YAML only outside of braces and brackets."""
    lines = text.splitlines()
    bare = line < len(lines) and re.search(r"[{,:\[]\s*\$\{", lines[line])
    return '; inside { } and [ ] write "${NAME}" in quotes' if bare else ""


def _check_depth(text: str, file: str) -> None:
    """Checks the depth on the events, which PyYAML creates without recursion, before the recursive composer runs."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                line = event.start_mark.line + 1 if event.start_mark else 1
                raise SpecRefused([Problem(file, line, "", f"nested deeper than {MAX_DEPTH} levels")])
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


class _Reader:
    def __init__(self, document: Document, environ: Mapping[str, str]) -> None:
        self._document = document
        self._environ = environ
        self._left = MAX_NODES
        self._scalars = yaml.SafeLoader("")

    def read(self, node: yaml.Node, path: DocumentPath) -> Any:
        self._left -= 1
        # An alias repeats its node, so a small file can expand to a huge value, and an alias inside its own node
        # never ends. Both are detected here, before the values are created.
        if self._left < 0 or len(path) > MAX_DEPTH:
            limit = f"more than {MAX_NODES} values or {MAX_DEPTH} levels once its aliases are expanded"
            raise SpecRefused([Problem(self._document.file, node.start_mark.line + 1, "", limit)])
        self._document.lines[path] = node.start_mark.line + 1
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.read(child, (*path, index)) for index, child in enumerate(node.value)]
        return self._scalar(node, path)

    def _mapping(self, node: yaml.MappingNode, path: DocumentPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "?"
            key_path = (*path, key)
            if key in values:
                self._document.lines[key_path] = key_node.start_mark.line + 1
                self._document.report(key_path, "this key is given twice")
            values[key] = self.read(value_node, key_path)
            self._document.lines[key_path] = key_node.start_mark.line + 1
        return values

    def _scalar(self, node: yaml.Node, path: DocumentPath) -> Any:
        plain = ("null", "bool", "int", "float", "str", "timestamp")
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        if kind not in plain:
            self._document.report(path, f"the tag {node.tag} is not allowed; write a plain value")
            return None
        # YAML 1.1 reads 1:30 as a number to the base of 60, in quadratic time; YAML 1.2 and this code read it as text.
        if kind in ("str", "timestamp") or (kind in ("int", "float") and ":" in node.value):
            text, missing = expand(node.value, self._environ)
            if text != node.value:
                self._document.from_environment.add(path)
            for name in missing:
                self._document.report(
                    path, f"the environment variable {name} is not set (${{{name}:-default}} gives one)"
                )
            return text
        if len(node.value) > MAX_NUMBER:
            self._document.report(path, f"this {kind} is longer than {MAX_NUMBER} characters; write text in quotes")
            return None
        try:
            return self._scalars.construct_object(node)
        except (ValueError, yaml.YAMLError):
            self._document.report(path, f"{node.value!r} is no {kind}")
            return None
