"""``${source.table}``-like templates: parsed once, rendered as a Spark expression or, for one event, in Python.

Strict rendering is null where a field is missing (the caller makes that a routing error); lenient renders it empty.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from millstream.pipelines.spec.document import is_reference

if TYPE_CHECKING:
    from pyspark.sql import Column

_USE = re.compile(r"\$\{([^{}]*)\}")
_FIELD = re.compile(r"[^.\[\]'\"*?\\\x00-\x1f]+(?:\.[^.\[\]'\"*?\\\x00-\x1f]+)*")
SOURCE_FIELDS = {"name": "name", "db": "db", "schema": "schema", "table": "table"}
ALLOWED = (
    "source.name, source.db, source.schema, source.table, op, id, key, tenant_id, "
    "before.<field>, after.<field>, row.<field> (after, or before where there is no after)"
)


class TemplateError(ValueError):
    """The text is no template, or names something that events do not have."""


@dataclass(frozen=True, slots=True)
class Reference:
    """One ``${...}``: a root (source, before, after, row, or a word of its own) and, below it, a field's path."""

    root: str
    field: str = ""

    @classmethod
    def parse(cls, name: str) -> Reference:
        root, _, field = name.partition(".")
        if not is_reference(name):
            raise TemplateError(f"${{{name}}} is unknown here; allowed are {ALLOWED}")
        if root == "source" and field not in SOURCE_FIELDS:
            raise TemplateError(f"${{{name}}} names no field of the source; allowed are {ALLOWED}")
        if root in ("before", "after", "row") and not _FIELD.fullmatch(field):
            raise TemplateError(f"${{{name}}} needs a field, such as ${{{root}.id}}")
        return cls(root, field)

    def __str__(self) -> str:
        return f"{self.root}.{self.field}" if self.field else self.root

    def column(self, tenant: str = "") -> Column:
        """The referenced value as text; null where the event has none."""
        from pyspark.sql import functions as F

        if self.root == "source":
            return F.col(SOURCE_FIELDS[self.field])
        if self.root == "tenant_id":
            return F.lit(tenant)
        if self.root in ("before", "after"):
            return F.get_json_object(F.col(self.root), json_path(self.field))
        if self.root == "row":
            return F.get_json_object(F.coalesce(F.col("after"), F.col("before")), json_path(self.field))
        return F.col(self.root)

    def value(self, event: Mapping[str, Any], tenant: str = "") -> str | None:
        """The same over one event in Python, with ``before`` and ``after`` as JSON text: what the column must equal."""
        if self.root == "tenant_id":
            return tenant
        if self.root == "source":
            found = event.get(SOURCE_FIELDS[self.field])
        elif self.root in ("before", "after", "row"):
            text = event.get("after") or event.get("before") if self.root == "row" else event.get(self.root)
            found = json.loads(text) if text else None
            for step in self.field.split("."):
                found = found.get(step) if isinstance(found, dict) else None
        else:
            found = event.get(self.root)
        if found is None or isinstance(found, str):
            return found
        return json.dumps(found, separators=(",", ":"), ensure_ascii=False)


def json_path(field: str) -> str:
    return "$" + "".join(f"['{step}']" for step in field.split("."))


@dataclass(frozen=True, slots=True)
class Template:
    parts: tuple[str | Reference, ...]

    @classmethod
    def parse(cls, text: str) -> Template:
        parts: list[str | Reference] = []
        at = 0
        for match in _USE.finditer(text):
            parts += [text[at : match.start()]] if match.start() > at else []
            parts.append(Reference.parse(match.group(1)))
            at = match.end()
        rest = text[at:]
        if "${" in rest:
            raise TemplateError(f"{text!r} has a ${{ that is not closed")
        return cls((*parts, rest) if rest else tuple(parts))

    @property
    def constant(self) -> str | None:
        """The text, where no event can change it."""
        texts = [part for part in self.parts if isinstance(part, str)]
        return "".join(texts) if len(texts) == len(self.parts) else None

    def references(self) -> Iterator[Reference]:
        return (part for part in self.parts if isinstance(part, Reference))

    def may_miss(self) -> bool:
        """Whether some event can lack what a strict rendering needs; op, id and the tenant are always there."""
        return any(part.root not in ("op", "id", "tenant_id") for part in self.references())

    def column(self, *, strict: bool, tenant: str = "") -> Column:
        from pyspark.sql import functions as F

        def shown(part: str | Reference) -> Column:
            if isinstance(part, str):
                return F.lit(part)
            return part.column(tenant) if strict else F.coalesce(part.column(tenant), F.lit(""))

        return F.concat(*(shown(part) for part in self.parts))

    def render(self, event: Mapping[str, Any], *, strict: bool, tenant: str = "") -> str | None:
        values = [part if isinstance(part, str) else part.value(event, tenant) for part in self.parts]
        if strict and None in values:
            return None
        return "".join(value or "" for value in values)
