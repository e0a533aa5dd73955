"""``${VAR}`` and ``${VAR:-default}`` from the environment; references of templates are left for the templates."""

from __future__ import annotations

import re
from collections.abc import Mapping

_USE = re.compile(r"\$\{([^{}]*)\}")
_ROOTS = ("source", "before", "after", "row")
_WORDS = ("op", "id", "key", "tenant_id")


def is_reference(name: str) -> bool:
    """Whether ``name`` in ``${name}`` means a part of the event, and not an environment variable."""
    return name in _WORDS or name.partition(".")[0] in _ROOTS


def expand(text: str, environ: Mapping[str, str]) -> tuple[str, list[str]]:
    """``text`` with its variables replaced, and the names of those that are not set."""
    missing: list[str] = []

    def value(match: re.Match[str]) -> str:
        inner = match.group(1)
        if is_reference(inner):
            return match.group(0)
        name, has_default, default = inner.partition(":-")
        found = environ.get(name)
        if found is None or (has_default and not found):
            if has_default:
                return default
            missing.append(name)
            return ""
        return found

    return _USE.sub(value, text), missing
