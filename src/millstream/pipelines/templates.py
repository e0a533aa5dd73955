"""``${source.table}``-like templates: parsed once, rendered as a Spark expression or, for one event, in Python.

Strict rendering returns null if a field is missing, which is a routing error; lenient rendering leaves it empty.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from millstream.pipelines.events import per_row
from millstream.pipelines.json_text import JsonError, Number, canonical, parse, template_text
from millstream.pipelines.paths import FieldPath, PathError
from millstream.pipelines.spec.document import is_reference

if TYPE_CHECKING:
    from pyspark.sql import Column

_USE = re.compile(r"\$\{([^{}]*)\}")
SOURCE_FIELDS = {"name": "name", "db": "db", "schema": "schema", "table": "table"}
ALLOWED = (
    "source.name, source.db, source.schema, source.table, op, id, key, tenant_id, "
    "before.<field>, after.<field>, row.<field> (after, or before where there is no after)"
)


ROWS = ("before", "after", "row")


class EventValues:
    """One event's columns, as references read them. Rows are parsed at the first access."""

    def __init__(self, columns: Mapping[str, Any], tenant: str = "") -> None:
        self.columns = columns
        self.tenant = tenant
        self._parsed: dict[str, Any] = {}

    def row(self, which: str) -> Any:
        """``before``, ``after``, or ``row``: after, or before if there is no after."""
        if which == "row":
            which = "before" if self.columns.get("after") is None else "after"
        if which not in self._parsed:
            self._parsed[which] = _row(self.columns.get(which))
        return self._parsed[which]


def _row(text: str | None) -> Any:
    """None also for text that is not JSON, which a failed event may have."""
    try:
        return None if text is None else parse(text)
    except JsonError:
        return None


@lru_cache(maxsize=1024)
def _path(field: str) -> FieldPath:
    """Caches the parsed path, which is used for every row."""
    return FieldPath.parse(field)


class TemplateError(ValueError):
    """The text is not a template, or names something that events do not have."""


@dataclass(frozen=True, slots=True)
class Reference:
    """One ``${...}``: a root (source, before, after, row, or another name) and the path of a field below it."""

    root: str
    field: str = ""

    @classmethod
    def parse(cls, name: str) -> Reference:
        root, _, field = name.partition(".")
        if not is_reference(name):
            raise TemplateError(f"${{{name}}} is unknown here; allowed are {ALLOWED}")
        if root == "source" and field not in SOURCE_FIELDS:
            raise TemplateError(f"${{{name}}} names no field of the source; allowed are {ALLOWED}")
        if root in ROWS:
            try:
                FieldPath.parse(field)
            except PathError as error:
                raise TemplateError(f"${{{name}}} needs a field, such as ${{{root}.id}}: {error}") from error
        return cls(root, field)

    def __str__(self) -> str:
        return f"{self.root}.{self.field}" if self.field else self.root

    def columns(self) -> tuple[str, ...]:
        """The columns of an event that it reads."""
        if self.root == "source":
            return (SOURCE_FIELDS[self.field],)
        if self.root == "row":
            return ("before", "after")
        # A tenant is not a column, but a function over rows needs one to know the number of rows.
        return ("op",) if self.root == "tenant_id" else (self.root,)

    def column(self, tenant: str = "") -> Column:
        """The value of a column of events; not for a field of a row."""
        from pyspark.sql import functions as F

        assert self.root not in ROWS, "a field of a row is read by a function"
        return F.lit(tenant) if self.root == "tenant_id" else F.col(self.columns()[0])

    def distinct_column(self, tenant: str = "") -> Column:
        """The value as text that is equal only for equal values: the number 1 is not the text 1."""
        return self._over(self._distinct, "string", tenant)

    def number_column(self) -> Column:
        """The value as a double if it is a number; None for text."""
        return self._over(self._number, "double")

    def _over(self, function: Callable[[EventValues], Any], returns: str, tenant: str = "") -> Column:
        from pyspark.sql import functions as F

        names = self.columns()

        def of_row(*values: str | None) -> Any:
            return function(EventValues(dict(zip(names, values, strict=True)), tenant))

        return per_row(of_row, returns, *(F.col(name) for name in names))

    def _distinct(self, event: EventValues) -> str | None:
        values = self.values(event)
        return None if not values else distinct_text(values[0] if len(values) == 1 else values)

    def _number(self, event: EventValues) -> float | None:
        values = self.values(event)
        return float(values[0]) if len(values) == 1 and isinstance(values[0], Number) else None

    def values(self, event: EventValues) -> list[Any]:
        """The JSON values that the event has there, without nulls."""
        if self.root in ROWS:
            values = _path(self.field).values(event.row(self.root))
        elif self.root == "tenant_id":
            values = [event.tenant]
        else:
            values = [event.columns.get(self.columns()[0])]
        return [value for value in values if value is not None]

    def text(self, event: EventValues) -> str | None:
        """The value as a template writes it: several from a list as a JSON array; None if there is none."""
        values = self.values(event)
        return None if not values else template_text(values[0] if len(values) == 1 else values)


def distinct_text(value: Any) -> str:
    """Text unchanged, unless it could be read as JSON of another type; other values as canonical JSON."""
    if not isinstance(value, str) or isinstance(value, Number):
        return canonical(value)
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair can be stored in a column only as an escape
        return canonical(value)
    return value if _row(value) is None and value != "null" else canonical(value)


def as_json(distinct: str | None) -> str:
    """The JSON value of a ``distinct_text``."""
    if distinct is None:
        return "null"
    return canonical(distinct) if _row(distinct) is None else distinct


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
        suffix = text[at:]
        if "${" in suffix:
            raise TemplateError(f"{text!r} has a ${{ that is not closed")
        return cls((*parts, suffix) if suffix else tuple(parts))

    @property
    def constant(self) -> str | None:
        """The text, if it does not depend on the event; else None."""
        texts = [part for part in self.parts if isinstance(part, str)]
        return "".join(texts) if len(texts) == len(self.parts) else None

    def references(self) -> Iterator[Reference]:
        return (part for part in self.parts if isinstance(part, Reference))

    def may_miss(self) -> bool:
        """Whether an event can lack a value that strict rendering needs; op, id and the tenant always exist."""
        return any(part.root not in ("op", "id", "tenant_id") for part in self.references())

    def column(self, *, strict: bool, tenant: str = "") -> Column:
        from pyspark.sql import functions as F

        if any(reference.root in ROWS for reference in self.references()):
            names = sorted({name for reference in self.references() for name in reference.columns()})

            def rendered(*values: Any) -> str | None:
                return self.render(EventValues(dict(zip(names, values, strict=True)), tenant), strict=strict)

            return per_row(rendered, "string", *(F.col(name) for name in names))

        def shown_part(part: str | Reference) -> Column:
            if isinstance(part, str):
                return F.lit(part)
            return part.column(tenant) if strict else F.coalesce(part.column(tenant), F.lit(""))

        return F.concat(*(shown_part(part) for part in self.parts))

    def render(self, event: EventValues, *, strict: bool) -> str | None:
        """The text for one event; None if it is strict and a part is missing."""
        values = [part if isinstance(part, str) else part.text(event) for part in self.parts]
        if strict and None in values:
            return None
        return "".join(value or "" for value in values)
