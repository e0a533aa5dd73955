"""Templates: allowed names, strict and lenient rendering for one event."""

from __future__ import annotations

import pytest

from millstream.pipelines.templates import EventValues, Template, TemplateError

EVENT = {"table": "orders", "db": None, "op": "u", "id": "s:1", "after": '{"id":5,"a":{"b":"x"}}', "before": None}


@pytest.mark.parametrize(
    ("text", "strict", "lenient"),
    [
        ("plain", "plain", "plain"),
        ("s.${source.table}.${op}", "s.orders.u", "s.orders.u"),
        ("${after.a.b}-${after.id}", "x-5", "x-5"),
        ("${after.a}", '{"b":"x"}', '{"b":"x"}'),
        ("k.${after.none}", None, "k."),
        ("${before.id}", None, ""),
        ("${source.db}", None, ""),
        ("${row.id}@${tenant_id}", "5@acme", "5@acme"),
        ("$not ${id}", "$not s:1", "$not s:1"),
    ],
)
def test_rendering(text: str, strict: str | None, lenient: str) -> None:
    template = Template.parse(text)
    assert template.render(EventValues(EVENT, "acme"), strict=True) == strict
    assert template.render(EventValues(EVENT, "acme"), strict=False) == lenient


@pytest.mark.parametrize(
    "text", ["${nothing}", "${source.colour}", "${after}", "${after.}", "${after.a['b']}", "${open", "${}", "${a.b"]
)
def test_invalid_templates_are_refused(text: str) -> None:
    with pytest.raises(TemplateError):
        Template.parse(text)


def test_templates_know_constants_and_optional_parts() -> None:
    assert Template.parse("a.b").constant == "a.b"
    assert Template.parse("${op}").constant is None
    assert not Template.parse("x.${op}.${tenant_id}").may_miss()
    assert Template.parse("${source.table}").may_miss()
