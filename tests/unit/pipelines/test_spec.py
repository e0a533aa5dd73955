"""A spec is accepted, or refused with every problem: file, line, path, and what is allowed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from millstream.pipelines.errors import SpecRefused
from millstream.pipelines.sinks.redis import RedisSink
from millstream.pipelines.spec.document import parse
from millstream.pipelines.spec.load import json_schema, load_pipelines, parse_pipeline

GOOD = """\
apiVersion: millstream/v1
kind: Pipeline
metadata: {name: orders, tenant: acme, labels: {team: shop}}
spec:
  source:
    type: generator
    config: {rows: 1000, seed: 7}
  processors:
    - type: filter
      tables: [orders]
  sinks:
    - type: redis
      config:
        id: orders-redis
        uri: ${REDIS_URI}
        stream: orders.events
        required: true
"""
ENVIRON = {"REDIS_URI": "redis://user:s3cret@localhost:6379"}


def problems(text: str, environ: dict[str, str] | None = None) -> list[tuple[int, str, str]]:
    with pytest.raises(SpecRefused) as refused:
        parse_pipeline(text, file="p.yaml", environ=ENVIRON if environ is None else environ)
    assert all(str(problem).startswith("p.yaml") for problem in refused.value.problems)
    return [(problem.line, problem.path, problem.message) for problem in refused.value.problems]


def test_existing_sink_block_is_accepted() -> None:
    pipeline = parse_pipeline(GOOD, environ=ENVIRON)
    sink = pipeline.spec.sinks[0]
    assert isinstance(sink, RedisSink)
    assert (sink.config.id, sink.config.stream, sink.config.required) == ("orders-redis", "orders.events", True)
    assert sink.config.uri == ENVIRON["REDIS_URI"]
    assert pipeline.checkpoint_path.endswith("/millstream/checkpoints/acme/orders")


def test_required_is_the_default_and_maxlen_and_durability_are_accepted() -> None:
    text = GOOD.replace("        required: true\n", "        maxlen: ~5000\n        durability: replicated(2)\n")
    config = parse_pipeline(text.replace("~5000", '"~5000"'), environ=ENVIRON).spec.sinks[0].config
    assert (config.required, config.maxlen, config.durability) == (True, "~5000", "replicated(2)")


def test_a_secret_is_in_no_repr_and_in_no_error() -> None:
    assert "s3cret" not in repr(parse_pipeline(GOOD, environ=ENVIRON))
    with pytest.raises(SpecRefused) as refused:
        parse_pipeline(GOOD.replace("type: redis", "type: redos"), environ=ENVIRON)
    assert "s3cret" not in str(refused.value)
    with pytest.raises(SpecRefused) as refused:
        parse_pipeline(GOOD, environ={"REDIS_URI": "http://user:s3cret@host"})
    assert "s3cret" not in str(refused.value)


def test_every_problem_is_in_one_message_with_its_line_and_path() -> None:
    text = GOOD.replace("kind: Pipeline", "kind: Pipe").replace("tables", "tabels").replace("stream:", "strem:")
    text += """\
    - type: redis
      config: {id: orders-redis, uri: "redis://h", stream: "x.${source.tabel}"}
    - type: kafka
"""
    result = problems(text, {})
    assert [(line, path) for line, path, _ in result] == [
        (2, "kind"),
        (10, "spec.processors[0].tabels"),
        (15, "spec.sinks[0].config.uri"),
        (16, "spec.sinks[0].config.strem"),
        (19, "spec.sinks[1].config.id"),
        (19, "spec.sinks[1].config.stream"),
        (20, "spec.sinks[2].type"),
    ]
    output = {path: message for _, path, message in result}
    assert "did you mean tables?" in output["spec.processors[0].tabels"]
    assert "REDIS_URI is not set" in output["spec.sinks[0].config.uri"]
    assert "allowed here: batch_timeout" in output["spec.sinks[0].config.strem"]
    assert "sinks[0] has the id" in output["spec.sinks[1].config.id"]
    assert "redis, files, console, spark" in output["spec.sinks[2].type"]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a: [1, 2", "not YAML"),
        ("\tx: 1", "not YAML"),
        ("", "one YAML document"),
        ("a: 1\n---\nb: 2\n", "one YAML document"),
        ("[" * 100 + "]" * 100, "nested deeper"),
        ("- " * 5000 + "x", "nested deeper"),
        ("x" * (1 << 20) + "y", "larger than"),
        ("a: &a [*a]", "aliases"),
        ("\0", "not YAML"),
    ],
)
def test_invalid_or_oversized_yaml_is_refused(text: str, part: str) -> None:
    [(_, _, message)] = problems(text)
    assert part in message


def test_alias_bomb_is_refused() -> None:
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    [(_, _, message)] = problems("\n".join(levels))
    assert "aliases are expanded" in message


def test_aliases_are_allowed() -> None:
    text = GOOD.replace("labels: {team: shop}", "labels: &l {team: shop}, annotations: *l")
    assert parse_pipeline(text, environ=ENVIRON).metadata.annotations == {"team": "shop"}


def test_a_key_given_twice_and_a_tag_are_problems() -> None:
    result = problems(GOOD.replace("      tables: [orders]", "      tables: [orders]\n      tables: [x]"))
    assert [(line, message) for line, _, message in result] == [(11, "this key is given twice")]
    result = problems(GOOD.replace("[orders]", "[!!python/name:os.system x]"))
    assert "not allowed" in result[0][2]


def test_an_empty_text_instead_of_a_mapping() -> None:
    assert problems("just text")[0][2].startswith("input should be")


def test_variables_with_defaults_and_numbers() -> None:
    text = GOOD.replace("rows: 1000", 'rows: "${ROWS:-12}"')
    assert parse_pipeline(text, environ=ENVIRON).spec.source.config.rows == 12
    assert parse_pipeline(text, environ={**ENVIRON, "ROWS": "99"}).spec.source.config.rows == 99
    [(line, path, message)] = problems(text, {**ENVIRON, "ROWS": "many"})
    assert (line, path) == (7, "spec.source.config.rows")
    assert "many" not in message


def test_a_template_that_names_a_missing_field_is_refused_where_the_fields_are_known() -> None:
    text = GOOD.replace("stream: orders.events", 'stream: "orders.${after.regoin}"')
    [(line, path, message)] = problems(text)
    assert (line, path) == (16, "spec.sinks[0].config.stream")
    assert "no such field in orders; there are amount, currency" in message
    renamed = text.replace("processors:", "processors:\n    - {type: rename, fields: {currency: regoin}}")
    assert parse_pipeline(renamed, environ=ENVIRON)


def test_template_in_a_wrong_field_is_refused() -> None:
    [(_, path, message)] = problems(GOOD.replace("[orders]", '["${source.table}"]'))
    assert path == "spec.processors[0].tables[0]"
    assert "not allowed here" in message


def test_stateful_processors_come_before_per_batch_ones() -> None:
    text = GOOD.replace(
        "    - type: filter",
        '    - {type: sql, query: "SELECT * FROM events"}\n    - {type: deduplicate}\n    - type: filter',
    )
    [(line, path, message)] = problems(text)
    assert (line, path) == (10, "spec.processors[1]")
    assert "cannot stand after sql" in message
    text = text.replace('sql, query: "SELECT * FROM events"', "aggregate, window: 1m, measures: {n: count}")
    [(_, _, message)] = problems(text)
    assert "cannot stand after aggregate" in message


def test_a_sink_without_a_stream_needs_a_route() -> None:
    text = GOOD.replace("        stream: orders.events\n", "")
    [(_, path, message)] = problems(text)
    assert path == "spec.sinks[0].config.stream"
    assert "route" in message
    routed = text.replace(
        "processors:", 'processors:\n    - {type: route, rules: [{when: {ops: [d]}, stream: gone}], default: "s.${op}"}'
    )
    assert parse_pipeline(routed, environ=ENVIRON)


def test_two_files_need_names_and_checkpoints_of_their_own(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.yaml").write_text(GOOD)
    with pytest.raises(SpecRefused, match="has the same name"):
        load_pipelines([tmp_path / "a.yaml", tmp_path / "b.yaml"], ENVIRON)
    with pytest.raises(SpecRefused, match="cannot be read"):
        load_pipelines([tmp_path / "none.yaml"], ENVIRON)


@pytest.mark.parametrize(
    ("predicate", "why"),
    [
        ("{field: after.x}", "exactly one test"),
        ("{field: after.x, eq: 1, ne: 2}", "exactly one test"),
        ("{field: elsewhere.x, eq: 1}", "unknown here"),
        ("{field: op, changed: true}", "needs a field of the row"),
        ('{field: op, regex: "("}', "not a regular expression"),
    ],
)
def test_predicates_are_checked(predicate: str, why: str) -> None:
    result = problems(GOOD.replace("      tables: [orders]", f"      where: {{all: [{predicate}]}}"))
    assert why in result[0][2]


def test_schema_for_editors_contains_the_parts() -> None:
    schema = json_schema()
    assert json.loads(json.dumps(schema)) == schema
    assert {"source", "processors", "sinks", "batch", "commit_policy", "dlq", "checkpoint", "spark"} <= set(
        schema["$defs"]["PipelineSpec"]["properties"]
    )
    assert schema["$defs"]["RedisSinkConfig"]["required"] == ["id", "uri"]
    assert yaml.safe_load(GOOD)["kind"] == schema["properties"]["kind"]["const"]


def test_base_60_number_is_text_and_a_huge_number_is_refused() -> None:
    """``1:1:1:...`` of 400 KB took 12 s: YAML 1.1 reads it as one number to the base of 60."""
    sixties = "1" + ":1" * 200_000
    document = parse(f"a: {sixties}\nb: 12:30\nc: {'9' * 200_000}\nd: 0b{'1' * 200_000}\n", "x.yaml", {})
    assert (document.value["a"], document.value["b"]) == (sixties, "12:30")
    assert [problem.line for problem in document.problems] == [3, 4]


REDIS = 'uri: "redis://h:1", stream: s'


@pytest.mark.parametrize(
    ("changed", "path", "says"),
    [
        ("sinks: [{type: console, config: {id: a, send_timeout: 5s}}]", "send_timeout", "unknown field"),
        ("sinks: [{type: files, config: {id: a, path: x, batch_timeout: 5s}}]", "batch_timeout", "unknown field"),
        (
            "sinks: [{type: spark, config: {id: a, format: delta, connect_timeout: 5s}}]",
            "connect_timeout",
            "unknown field",
        ),
        (f"sinks: [{{type: redis, config: {{id: a, {REDIS}, queue: {{max_bytes: 5}}}}}}]", "queue", "required: false"),
        ("batch: {max_bytes: 5}", "batch.max_bytes", "it takes max_events"),
        (
            "source: {type: files, config: {path: x, format: json}}\n  batch: {max_events: 5}",
            "max_events",
            "it takes max_bytes",
        ),
        (
            "source: {type: spark, config: {format: rate}}\n  batch: {max_events: 5}",
            "max_events",
            "maxOffsetsPerTrigger",
        ),
        (
            "source: {type: files, config: {path: x, format: json, max_files: 1}}\n  batch: {max_bytes: 5}",
            "max_files",
            "one bound",
        ),
    ],
)
def test_unsupported_setting_of_a_part_is_refused(changed: str, path: str, says: str) -> None:
    parts = {
        "source": "source: {type: generator, config: {rows: 1}}",
        "sinks": f"sinks: [{{type: redis, config: {{id: a, {REDIS}}}}}]",
    }
    parts = {name: text for name, text in parts.items() if f"{name}:" not in changed}
    body = "\n  ".join([*parts.values(), changed])
    text = f"apiVersion: millstream/v1\nkind: Pipeline\nmetadata: {{name: n}}\nspec:\n  {body}\n"
    with pytest.raises(SpecRefused) as refused:
        parse_pipeline(text)
    [problem] = refused.value.problems
    assert path in problem.path
    assert says in problem.message


@pytest.mark.parametrize(
    ("before", "field", "why"),
    [
        ("", "after.phone", "Write 'phone'"),
        ("{type: rename, fields: {email: mail}}", "email", "name it mail"),
        ("{type: drop, fields: [email]}", "email", "it drops that field"),
        ("{type: select, fields: [status]}", "email", "not among the fields"),
        ("{type: flatten}", "address.city", "name it address__city"),
        ("", "colour", "the source has no field 'colour'"),
        ("{type: rename, fields: {colour: mail}}", "mail", "the source has no field 'colour'"),
    ],
)
def test_a_mask_that_can_never_match_is_refused(before: str, field: str, why: str) -> None:
    chain = [line for line in (before, f"{{type: mask, fields: {{{field}: hash}}}}") if line]
    listed = "".join(f"    - {line}\n" for line in chain)
    [(_, _, message)] = problems(GOOD.replace("    - type: filter\n      tables: [orders]\n", listed))
    assert "can never match" in message
    assert why in message


@pytest.mark.parametrize(
    "before",
    [
        "{type: rename, fields: {email: mail}}",
        "{type: select, fields: [email, status]}",
        '{type: sql, query: "SELECT 1 AS mail FROM events"}',
    ],
)
def test_a_mask_that_may_match_is_accepted(before: str) -> None:
    field = "email" if "select" in before else "mail"
    listed = f"    - {before}\n    - {{type: mask, fields: {{{field}: hash}}}}\n"
    assert parse_pipeline(GOOD.replace("    - type: filter\n      tables: [orders]\n", listed), environ=ENVIRON)


REDIS_SOURCE = "source: {type: redis, config: {uri: 'redis://u:pw@h:1', %s}}"
REDIS_SINK = "sinks: [{type: redis, config: {id: s, uri: 'redis://h:1', stream: '%s'}}]"


@pytest.mark.parametrize(
    ("read", "written", "more", "path"),
    [
        ("streams: [in]", "in", "", "spec.sinks[0].config.stream"),
        ("pattern: 'orders.*'", "orders.out", "", "spec.sinks[0].config.stream"),
        ("streams: [in]", "o", "dlq: {stream: in}", "spec.dlq.stream"),
        ("streams: [in]", "o", "dlq: {stream: o}", "spec.dlq.stream"),
        ("pattern: '.*q'", "o", "", "spec.dlq.stream"),
        ("streams: [in]", "a}b", "", "spec.sinks[0].config.stream"),
        ("streams: [in]", "o", "dlq: {stream: 'o}x'}", "spec.dlq.stream"),
        ("streams: [a, a]", "o", "", "spec.source.config"),
        ("streams: ['a,b']", "o", "", "spec.source.config"),
        ("stream: 'a '", "o", "", "spec.source.config"),
        ("pattern: '('", "o", "", "spec.source.config"),
        (
            "streams: [in]",
            "o",
            "processors: [{type: route, rules: [{when: {ops: [c]}, stream: in}]}]",
            "spec.processors[0].rules[0].stream",
        ),
    ],
)
def test_streams_that_cannot_work_together_are_refused(read: str, written: str, more: str, path: str) -> None:
    lines = [REDIS_SOURCE % read, REDIS_SINK % written, *filter(None, [more])]
    head = "apiVersion: millstream/v1\nkind: Pipeline\nmetadata: {name: p}\nspec:\n"
    text = head + "".join(f"  {line}\n" for line in lines)
    assert path in [result[1] for result in problems(text)]


@pytest.mark.parametrize("stream", ["o", "${after.to}", "{a}.b", "orders"])
def test_streams_of_their_own_are_accepted(stream: str) -> None:
    lines = [REDIS_SOURCE % "streams: [in, a b]", REDIS_SINK % stream]
    head = "apiVersion: millstream/v1\nkind: Pipeline\nmetadata: {name: p}\nspec:\n"
    parse_pipeline(head + "".join(f"  {line}\n" for line in lines), environ={})


def test_every_field_of_the_schema_has_a_description() -> None:
    """The options page and editors show it. It is the docstring below the field."""
    schema = json_schema()
    models = {"Pipeline": schema, **schema["$defs"]}
    undescribed = [
        f"{model}.{name}"
        for model, definition in models.items()
        for name, field in definition.get("properties", {}).items()
        if name not in ("type", "config") and "description" not in field
    ]
    assert len(models) > 30
    assert not undescribed
