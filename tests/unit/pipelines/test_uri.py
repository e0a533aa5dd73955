"""Addresses in a spec are checked when it is read, and their passwords are never displayed."""

from __future__ import annotations

from typing import Any

import pytest
from specs import pipeline, planned, redis_sink

from millstream.pipelines.checkpoint import fingerprint
from millstream.pipelines.errors import SpecRefused
from millstream.pipelines.plan import describe, make_plan
from millstream.pipelines.redis_address import without_password, without_secrets
from millstream.pipelines.spec.load import parse_pipeline

SPEC = """
apiVersion: millstream/v1
kind: Pipeline
metadata: {name: orders}
spec:
  source: {type: generator, config: {rows: 10}}
  %s
  sinks: [{type: redis, config: {id: main, stream: out, uri: %s}}]
"""


def refused(uri: str = "redis://localhost", more: str = "", environ: dict[str, str] | None = None) -> str:
    with pytest.raises(SpecRefused) as caught:
        parse_pipeline(SPEC % (more, uri), file="p.yaml", environ=environ or {})
    return str(caught.value)


@pytest.mark.parametrize(
    ("uri", "people", "compared"),
    [
        ("redis://host:1/2", "redis://host:1/2", "redis://host:1/2"),
        ("redis://user@host", "redis://user@host", "redis://host"),
        ("redis://user:s3cret@host", "redis://user:***@host", "redis://host"),
        ("redis://:s3@cret@host", "redis://:***@host", "redis://host"),
        ("redis://host?password=s3cret&db=1", "redis://host?password=***&db=1", "redis://host?&db=1"),
        (
            "redis+sentinel://a:s3cret@h1,h2/x?sentinel_password=s3cret",
            "redis+sentinel://a:***@h1,h2/x?sentinel_password=***",
            "redis+sentinel://h1,h2/x?",
        ),
        ("unix:///run/r.sock?password=s3cret", "unix:///run/r.sock?password=***", "unix:///run/r.sock?"),
    ],
)
def test_password_is_never_displayed(uri: str, people: str, compared: str) -> None:
    assert (without_password(uri), without_secrets(uri)) == (people, compared)
    assert "s3cret" not in str(describe(planned(sinks=[redis_sink(uri=uri)])))


def test_changed_password_is_the_same_source() -> None:
    def digests(uri: str) -> Any:
        return fingerprint(make_plan(pipeline(source={"type": "redis", "config": {"uri": uri, "stream": "in"}})))

    assert digests("redis://h?password=a") == digests("redis://h?password=b")
    assert digests("redis://:a@b@h") == digests("redis://:c@h")
    assert digests("redis://:a@h") != digests("redis://:a@g")


@pytest.mark.parametrize(
    ("uri", "why"),
    [
        ("redis://[::1", "a well-formed URL"),
        ("redis://host:many", "a port from 1 to 65535"),
        ("redis://host:70000", "a port from 1 to 65535"),
        ("redis://one,two", "redis+cluster:// or redis+sentinel:// for several"),
        ("redis+sentinel://host", "service-name"),
        ("redis://host/zero", "a database number"),
        ("redis://host?timeout=5", "one of the options"),
    ],
)
def test_an_address_that_cannot_work_is_refused_with_its_place(uri: str, why: str) -> None:
    output = refused(f'"{uri}"')
    assert "p.yaml:8: spec.sinks[0].config.uri: write " in output
    assert why in output


@pytest.mark.parametrize(
    ("uri", "more"),
    [
        ("user:s3cret@localhost:6379", ""),
        ("redis:s3cret", ""),
        ("redis://:s3cret@host:many", ""),
        ("redis://host:many?password=s3cret", ""),
        ("redis://localhost", "processors: [{type: mask, fields: {a: hash}, salt: [s3cret]}]"),
        ("redis://localhost", "processors: [{type: mask, fields: {a: hash}, salt: 53037}]"),
        ("redis://localhost", "dlq: {uri: 53037}"),
    ],
)
def test_error_does_not_quote_a_value_that_may_be_secret(uri: str, more: str) -> None:
    output = refused(f'"{uri}"', more)
    assert "s3cret" not in output
    assert "53037" not in output


def test_other_values_are_repeated() -> None:
    assert "(not 'many')" in refused(more="batch: {max_events: many}")


def test_an_unset_variable_hides_no_other_problem_of_its_line() -> None:
    output = refused('"${NOWHERE}", strem: x')
    assert "NOWHERE is not set" in output
    assert "strem: unknown field" in output
    assert output.count("config.uri") == 1


def test_two_unset_ids_are_not_one_id_twice() -> None:
    template = '{type: redis, config: {id: "$%s", stream: out, uri: "redis://localhost"}}'
    text = SPEC.partition("  sinks:")[0] % "" + f"  sinks: [{template % '{A}'}, {template % '{B}'}]"
    with pytest.raises(SpecRefused) as caught:
        parse_pipeline(text, environ={})
    assert [problem.path for problem in caught.value.problems] == [f"spec.sinks[{n}].config.id" for n in (0, 1)]


def test_unquoted_variable_in_braces_has_a_hint() -> None:
    assert 'write "${NAME}" in quotes' in refused("${NOWHERE}")
    assert "in quotes" not in refused("{")


@pytest.mark.parametrize(
    ("other", "is_same"),
    [
        ("redis://localhost", True),
        ("redis://LOCALHOST:6379/0", True),
        ("redis://user:s3cret@127.0.0.1/", True),
        ("redis://localhost:6380", False),
        ("redis://localhost/1", False),
        ("redis://localhost?db=1", False),
        ("rediss://localhost", False),
        ("redis://other", False),
    ],
)
def test_source_stream_is_recognized_in_every_spelling_of_its_address(other: str, is_same: bool) -> None:
    text = f"""
apiVersion: millstream/v1
kind: Pipeline
metadata: {{name: orders}}
spec:
  source: {{type: redis, config: {{uri: "redis://localhost:6379", stream: in}}}}
  sinks: [{{type: redis, config: {{id: main, stream: in, uri: "{other}"}}}}]
"""
    if is_same:
        with pytest.raises(SpecRefused, match="would never end"):
            parse_pipeline(text, file="p.yaml", environ={})
    else:
        parse_pipeline(text, file="p.yaml", environ={})
