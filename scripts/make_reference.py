"""Generates the pages under docs/reference from the code: commands, JSON, options, metrics, keys and the API.

``python scripts/make_reference.py`` writes them; ``--check`` only checks whether they are up to date.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import typer
from prometheus_client import CollectorRegistry
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from millstream import open_broker
from millstream.broker import Limits
from millstream.broker.keys import LEGEND, OTHER_KEYS
from millstream.broker.transport.local_address import LocalAddress
from millstream.broker.transport.targets import CLIENT_OPTIONS, OPTIONS
from millstream.cdc import options as cdc_options
from millstream.cdc.mariadb import database as mariadb
from millstream.cdc.postgres import database as postgres
from millstream.cli.json_keys import ANSWERS, KINDS
from millstream.cli.main import CHAPTERS, build
from millstream.cli.main import LEGEND as EXITS
from millstream.messaging import Publisher, Subscriber
from millstream.messaging.codecs import codec_names
from millstream.messaging.consumer.in_flight import UNSTARTED, Event, State, all_transitions
from millstream.messaging.retention import DELETE_ACKED, KEEP
from millstream.messaging.settings import RetentionOptions, SubscriberSettings
from millstream.model import DURATION_PATTERN, SIZE_PATTERN
from millstream.observe.metrics import StreamStatsCollector
from millstream.observe.pipelines import PipelineMetrics
from millstream.observe.service import ServiceMonitor
from millstream.pipelines.envelopes import CloudEvents, Debezium, Envelope
from millstream.pipelines.processors import PROCESSORS
from millstream.pipelines.processors.filter import Condition, Match, Predicate, Rule
from millstream.pipelines.sinks import SINKS
from millstream.pipelines.sinks.sink import Sink, SinkQueueConfig
from millstream.pipelines.sources import SOURCES
from millstream.pipelines.spec.part import IN_WORDS
from millstream.pipelines.spec.pipeline import Metadata, PipelineSpec
from millstream.runner.fleet import Fleet
from millstream.runner.fleet_metrics import FleetCollector

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"


def commands() -> Iterator[tuple[str, Any]]:
    """Yield every command with its full name and its Click command."""
    for name in CHAPTERS:
        whole: Any = typer.main.get_command(build([name]))
        chapter = whole.commands[name]
        subcommands: dict[str, Any] = getattr(chapter, "commands", {})
        if subcommands:
            yield from ((f"{name} {word}", subcommand) for word, subcommand in subcommands.items())
        else:
            yield name, chapter


def takes(command: Any, option: str) -> bool:
    return any(option in parameter.opts for parameter in command.params)


def command_line() -> str:
    by_name = dict(commands())
    without = {
        option: [name for name, command in by_name.items() if not takes(command, option)] for option in ("--url", "-o")
    }
    lines = [
        "# The command line",
        "",
        "Generated from the code. `millstream COMMAND --help` explains each option.",
        "",
        f"Every command takes `--url` (or `MILLSTREAM_URL`), except {_listed(without['--url'])}.",
        f"Every command takes `-o table|json` ([the keys](json.md)), except {_listed(without['-o'])}.",
        "Both may also stand before the command: `millstream --url redis://db:6379 streams ls`.",
        "Tables fit the terminal: numbers and ids are never cut, names are cut in the middle.",
        "",
        "| command | what it does |",
        "|---|---|",
    ]
    lines += [f"| `millstream {name}` | {chapter.help} |" for name, chapter in CHAPTERS.items()]
    lines += ["", "## Arguments and options", "", "| command | arguments | options |", "|---|---|---|"]
    for name, command in by_name.items():
        arguments = " ".join(
            parameter.name.upper() for parameter in command.params if parameter.param_type_name == "argument"
        )
        options = [
            f"`{parameter.opts[0]}`"
            for parameter in command.params
            if parameter.param_type_name == "option" and not parameter.hidden
        ]
        lines.append(f"| `{name}` | {arguments} | {', '.join(options)} |")
    lines += ["", "## Exit codes", "", "| code | meaning |", "|---|---|"]
    lines += [f"| {code} | {meaning} |" for code, meaning in EXITS.items()]
    lines += ["", "## Completion", "", "`millstream --install-completion` installs it for the shell that is running."]
    return "\n".join(lines) + "\n"


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def keys() -> str:
    lines = [
        "# Companion keys of a stream",
        "",
        "Every companion key of the stream `orders` is named `{orders}.<suffix>`, and is",
        "stored in the same slot. Generated from the code.",
        "",
        "| suffix | contents | removed |",
        "|---|---|---|",
    ]
    lines += [f"| `{key.suffix}` | {key.holds} | {key.ends} |" for key in LEGEND]
    lines += ["", "## Other keys", "", "| name | contents | removed |", "|---|---|---|"]
    lines += [f"| `{key.suffix}` | {key.holds} | {key.ends} |" for key in OTHER_KEYS]
    return "\n".join(lines) + "\n"


def json_keys() -> str:
    shapes = {"list": "a list of objects", "object": "one object", "lines": "one object per line"}
    lines = [
        "# What `-o json` prints",
        "",
        "Numbers are numbers, times are ISO 8601 in UTC, durations are milliseconds (`_ms`), sizes bytes (`_bytes`).",
        "Keys are stable; new ones may be added. Generated from the code; a test checks every command.",
        "",
        "| kind | meaning |",
        "|---|---|",
    ]
    lines += [f"| {kind} | {meaning} |" for kind, meaning in KINDS.items()]
    lines += ["", "A kind followed by `?` may be null."]
    for command, answer in ANSWERS.items():
        lines += [
            "",
            f"## `millstream {command}`",
            "",
            f"Prints {shapes[answer.shape]}.",
            "",
            "| key | kind |",
            "|---|---|",
        ]
        lines += [f"| `{key}` | {kind} |" for key, kind in _flattened(answer.keys)]
    return "\n".join(lines) + "\n"


def _flattened(keys: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, kind in keys.items():
        if isinstance(kind, list):
            yield f"{prefix}{key}", "a list of objects"
            yield from _flattened(kind[0], f"{prefix}{key}[].")
        else:
            yield f"{prefix}{key}", kind


def options() -> str:
    lines = ["# Options and limits", "", "Generated from the code: all options with their defaults."]
    lines += ["Times are in milliseconds and sizes in bytes; in the spec of a pipeline they have a unit.", ""]
    lines += ["## URLs", "", "| URL | query parameters |", "|---|---|"]
    local = [name for name in LocalAddress._fields if name not in ("name", "path")]
    lines += [f"| `local://`, `local:///path` | {_listed(local)} |", f"| servers | {_listed(list(OPTIONS))} |", ""]
    lines += [
        f"These settings of a redis-py client are used: {_listed(list(CLIENT_OPTIONS))}, and its address.",
        "Its timeouts, retries and decoding are ignored.",
        "",
    ]
    lines += ["## Limits", "", "`open_broker(url, limits=Limits(...))`.", "", *_documented(Limits)]
    lines += ["", "## `open_broker`", "", *_parameters(open_broker, _OPEN_BROKER)]
    lines += ["", "## `Subscriber`", "", *_parameters(Subscriber, {**_SUBSCRIBER, **_sentences(SubscriberSettings)})]
    lines += [
        "",
        "## Retention",
        "",
        "Options of `Router`, `Router.on`, `Router.add` and the buses.",
        "",
        *_retention(),
    ]
    lines += ["", "## `Publisher`", "", *_parameters(Publisher, _PUBLISHER)]
    lines += ["", "## A pipeline's spec", "", "`millstream pipeline schema` prints the same as a JSON Schema."]
    lines += [f"{_NAME.capitalize()} has {_name_rule()}.", *_spec()]
    where = "[Read and write Redis Streams from Spark](../how-to/spark.md#options)"
    lines += ["", "## Options of `redis_streams`", "", f"They are listed in {where}."]
    for title, module in _CHANGE_SOURCES.items():
        lines += ["", f"## {title}", "", "| option | meaning |", "|---|---|"]
        lines += [f"| `{name}` | {text} |" for name, text in _described_options(module).items()]
    lines += ["", *_spellings()]
    return "\n".join(lines) + "\n"


_CHANGE_SOURCES = {
    "Options of `postgres_changes` and `mariadb_changes`": cdc_options,
    "Further options of `postgres_changes`": postgres,
    "Further options of `mariadb_changes`": mariadb,
}


def _described_options(module: ModuleType) -> dict[str, str]:
    """Return the indented definitions in the module's docstring: names at the left, what they mean to the right."""
    described: dict[str, str] = {}
    names = ""
    for line in inspect.cleandoc(module.__doc__ or "").splitlines():
        definition = re.match(r"    ([A-Za-z, ]+?)(?:  +(\S.*))?$", line)
        if line.startswith(" " * 16):
            described[names] = f"{described[names]} {line.strip()}".strip()
        elif definition:
            names = definition[1].replace(", ", "`, `")
            described[names] = definition[2] or ""
    return {names: _cell(text) for names, text in described.items()}


_SPELLINGS = (
    ("address of Redis", "`url`", "`uri`", "`--url`, `MILLSTREAM_URL`", "`url`, `urlFile`"),
    ("address of a database", "", "`dsn`", "", "`dsn`, `dsnFile`"),
    ("file with a password", "", "`password_file`", "`--password-file`", "`passwordFile`"),
    ("length of a stream, never below what a group needs", "`max_stream_len`, `max_len`", "", "`--max-len`", ""),
    (
        "hard limit of its length",
        "`hard_max_stream_len`, `hard_max_len`",
        "`maxlen`",
        "`--hard-max-len`",
        "`maxlen`",
    ),
    ("age of entries", "`keep`, `max_age_ms`", "`max_age`", "`--max-age`", ""),
    ("deadline of a call with its retries", "`deadline_ms`", "`batch_timeout`", "", "`deadlineMs`"),
    ("deadline of the retries after that", "`retry_ms`", "`deadline`", "", ""),
    ("limit for opening a connection", "`connect_ms`", "`connect_timeout`", "", "`connectTimeoutMs`"),
    ("limit for a reply", "`answer_ms`", "`send_timeout`", "", "`answerTimeoutMs`"),
    ("limit for stopping", "`close_timeout_ms`", "", "`--drain`, `--stop-timeout`", ""),
    ("idle time of a pending entry", "`claim_min_idle_ms`", "", "`--idle`", ""),
    ("entries of one read", "`count`", "", "`--count`", "`pageSize`"),
    ("events of one batch", "`max_batch`", "`max_events`", "", "`maxOffsetsPerTrigger`, `maxChangesPerTrigger`"),
    ("bytes of one batch", "`max_batch_bytes`", "`max_bytes`", "", "`maxBytesPerTrigger`"),
    ("when a write is complete", "`durability`", "`durability`", "", "`durability`"),
    ("how long an id is stored", "`idempotency_window_ms`", "`event_id_window`", "", "`eventIdWindow`"),
)
"""The spellings of a concept in Python, in the YAML of pipelines, on the command line, and as options of Spark."""


def _spellings() -> list[str]:
    lines = [
        "## One concept, several spellings",
        "",
        "Python has the unit in the name (`_ms`, `_bytes`), YAML and the command line have it in the value (`30s`,",
        "`1GiB`). YAML has the names that users of CDC tools know. Spark's options are in camel case, as those of its",
        "Kafka source.",
        "",
        "| concept | Python | YAML | command line | Spark |",
        "|---|---|---|---|---|",
    ]
    return lines + [f"| {' | '.join(row)} |" for row in _SPELLINGS]


def _retention() -> list[str]:
    texts = _sentences(RetentionOptions)
    rows = [f"| `{name}` | {default} | {texts[name]} |" for name, default in ((KEEP, ""), (DELETE_ACKED, "`False`"))]
    return ["| option | default | what it is |", "|---|---|---|", *rows]


def _documented(kind: type) -> list[str]:
    """Return a table of a dataclass's fields, with the docstring below each field."""
    texts = _sentences(kind)
    rows = [
        f"| `{name}` | {_default_text(getattr(kind(), name))} | {texts.get(name, '')} |"
        for name in kind.__annotations__
    ]
    return ["| option | default | what it is |", "|---|---|---|", *rows]


def _sentences(kind: type) -> dict[str, str]:
    [tree] = ast.parse(inspect.getsource(kind)).body
    assert isinstance(tree, ast.ClassDef), "a class"
    sentences = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        text = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else None
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, str):
            sentences[field.target.id] = _cell(text)
    return sentences


_OPEN_BROKER = {
    "max_stream_len": "Streams are trimmed to this length, but never below what a group still needs. None: no "
    "trimming. The default is 10,000 on `local://` and none on servers.",
    "hard_max_stream_len": "A length that holds regardless of groups; entries that a group loses are counted.",
    "deadline_ms": "For all attempts of one call while the server cannot be reached.",
    "observer": "A function that receives observer events, such as a `ServiceMonitor`.",
    "clock": "Another clock, for tests of `local://`.",
    "limits": "See above.",
}
_SUBSCRIBER = {
    "group": "The consumer group; None: every process receives every message.",
    "consumer": "The name in the group. The default is unique; two processes must never share a name.",
    "process_max_bytes_in_flight": "The same, in bytes of payload.",
    "ack_policy": "What follows from an error: `NACK_ON_ERROR` retries, `REJECT_ON_ERROR` dead-letters, `ACK` "
    "and `ACK_FIRST` acknowledge after and before the handler, `MANUAL` leaves it to the handler.",
    "codec": "How entries hold messages: CODECS.",
    "backoff": "Pauses between deliveries of a message that failed: `Backoff(initial_ms=..., max_ms=...)`.",
    "ordered_by_key": "True: messages with the same metadata `key` are handled in order, also across retries. Or a "
    "function that returns the key of a message.",
}
_PUBLISHER = {
    "codec": "How entries hold messages: CODECS. Use that of the subscribers.",
    "durability": "When a publish is complete: `memory`, `appended`, `fsynced` or `replicated(n)`.",
    "max_batch": "Messages in one batch.",
    "max_batch_bytes": "Bytes in one batch. A larger message travels alone.",
    "max_buffered": "Messages that wait to be stored; beyond that, `publish` waits.",
    "max_buffered_bytes": "The same, in bytes.",
    "idempotency_window_ms": "For how long a repeated `idempotency_key` adds nothing.",
    "retry_ms": "How long a publish is tried again while the broker cannot be reached, beyond `deadline_ms`.",
    "partitions": 'Topics that are split by key, and into how many streams: `{"orders": 16}`.',
    "marshaler": "Makes messages of pydantic models and dataclasses; by default JSON.",
}


def _parameters(function: Callable[..., Any], texts: Mapping[str, str]) -> list[str]:
    """Fails for an option without a sentence."""
    rows = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            default = "must be given" if parameter.default is parameter.empty else _default_text(parameter.default)
            text = texts[name].replace("CODECS", ", ".join(f"`{codec}`" for codec in sorted(codec_names())))
            rows.append(f"| `{name}` | {default} | {text} |")
    return ["| option | default | what it is |", "|---|---|---|", *rows]


_NESTED_PARTS: dict[type[BaseModel], str] = {
    SinkQueueConfig: "`queue` of a sink",
    Match: "`filter` of a sink, and `when` of a rule",
    Condition: "`where` of a filter",
    Predicate: "A predicate in `all` or `any`",
    Rule: "A rule in `rules`",
    Debezium: "Envelope `debezium`",
    CloudEvents: "Envelope `cloudevents`",
}
"""Parts within the config of a source, processor or sink."""


def _spec() -> Iterator[str]:
    yield from _part("`metadata`", Metadata)
    yield from _part("`spec`", PipelineSpec)
    for name, info in PipelineSpec.model_fields.items():
        if isinstance(info.default, BaseModel):
            yield from _part(f"`{name}`", type(info.default))
    for word, kinds in (("Source", SOURCES), ("Processor", PROCESSORS), ("Sink", SINKS)):
        for name, kind in kinds.items():
            config = kind.model_fields.get("config")
            yield from _part(f"{word} `{name}`", kind if config is None else config.annotation)
    yield from _part("Every sink", Sink)
    for kind, title in _NESTED_PARTS.items():
        yield from _part(title, kind)


def _part(title: str, model: Any) -> Iterator[str]:
    """Yield the table of a part's options. Fails for an option without a description."""
    yield from ("", f"### {title}", "", "| option | default | allowed | what it is |", "|---|---|---|---|")
    properties = model.model_json_schema(by_alias=True)["properties"]
    for name, info in model.model_fields.items():
        if name not in ("type", "config"):
            option = info.alias or name
            allowed = _allowed(properties[option])
            yield f"| `{option}` | {_default(info, allowed)} | {allowed} | {_cell(properties[option]['description'])} |"


_DURATION = "a duration"
_SIZE = "a size"
_NAME = "a name"
_COUNT = "a whole number, 0 or more"


def _name_rule() -> str:
    return IN_WORDS[Metadata.model_json_schema()["properties"]["name"]["pattern"]]


def _allowed(schema: dict[str, Any]) -> str:
    """Return the values that a JSON Schema allows, in words."""
    if "const" in schema or "enum" in schema:
        return ", ".join(f"`{_yaml(value)}`" for value in schema.get("enum", [schema.get("const")]))
    if "$ref" in schema or "oneOf" in schema:
        return "see below"
    if "anyOf" in schema:
        return _any_of([_allowed(alternative) for alternative in schema["anyOf"] if alternative.get("type") != "null"])
    match schema.get("type"):
        case "array":
            return f"a list: {_allowed(schema['items'])}"
        case "object":
            return f"by name: {_allowed(schema['additionalProperties'])}"
        case "boolean":
            return "`true`, `false`"
        case "integer":
            return f"a whole number{_bounds(schema)}"
        case "number":
            return f"a number{_bounds(schema)}"
    return _text_allowed(schema)


def _any_of(alternatives: list[str]) -> str:
    if _SIZE in alternatives:  # a size without a unit is in bytes
        alternatives.remove(_COUNT)
    if "a number" in alternatives:
        alternatives.remove("a whole number")
    return " or ".join(alternatives).replace(f"{_COUNT} or {_DURATION}", f"{_DURATION}, or a number of milliseconds")


def _text_allowed(schema: dict[str, Any]) -> str:
    pattern = schema.get("pattern")
    if pattern is None:
        return "a URI" if schema.get("format") == "uri" else "a text"
    kinds = {f"^{DURATION_PATTERN}$": _DURATION, f"^{SIZE_PATTERN}$": _SIZE}
    words = kinds.get(pattern) or IN_WORDS[pattern]
    return _NAME if words == _name_rule() else words


def _bounds(schema: dict[str, Any]) -> str:
    minimum, maximum = schema.get("minimum"), schema.get("maximum", schema.get("exclusiveMaximum"))
    if minimum is None:
        return f", more than {schema['exclusiveMinimum']:g}" if "exclusiveMinimum" in schema else ""
    return f", {minimum:g} or more" if maximum is None or maximum > 2**32 else f", {minimum:g} to {maximum:,}"


def _default(info: FieldInfo, allowed: str) -> str:
    if info.is_required():
        return "must be given"
    value = info.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, BaseModel):
        return f"`{value.type}`" if isinstance(value, Envelope) else "see below"
    if type(value) is int and value and _DURATION in allowed:
        return f"`{_with_unit(value, _MILLISECONDS)}`"
    if type(value) is int and _SIZE in allowed:
        return f"`{_with_unit(value, _BYTES)}`"
    return f"`{_yaml(value)}`" if isinstance(value, bool) else _default_text(value)


_MILLISECONDS = {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1_000, "ms": 1}
_BYTES = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "B": 1}


def _with_unit(value: int, units: Mapping[str, int]) -> str:
    """Return the value as YAML has it, in the largest unit that gives a whole number."""
    return next(f"{value // size}{unit}" for unit, size in units.items() if value % size == 0)


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _default_text(value: Any) -> str:
    if value is None or value in ("", [], {}) or hasattr(value, "get_secret_value"):
        return ""
    if callable(value):
        return f"`{getattr(value, '__name__', type(value).__name__)}`"
    if isinstance(value, Limits):
        return "`Limits()`"
    return f"`{value:,}`" if type(value) is int else f"`{value}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")


def metrics() -> str:
    lines = ["# Metrics", "", "Generated from the code, with the help texts of the exposition.", ""]
    headings = ("Services", of_services()), ("`millstream run`", of_fleets()), ("Pipelines", of_pipelines())
    for heading, families in headings:
        lines += [f"## {heading}", "", "| metric | kind | labels | meaning |", "|---|---|---|---|"]
        lines += [f"| `{name}` | {kind} | {', '.join(labels)} | {text} |" for name, kind, text, labels in families]
        lines.append("")
    return "\n".join(lines)


Family = tuple[str, str, str, tuple[str, ...]]


def of_services() -> list[Family]:
    """Return the metrics of a monitor with all options enabled."""
    monitor = ServiceMonitor(port=None, per_consumer=True)
    registry = monitor.registry
    monitor.watch(own=lambda: True)
    monitor._statuses.update([], {})
    registry.register(StreamStatsCollector(open_broker("local://reference"), ["*"], per_consumer=True))
    return _families(registry)


def of_fleets() -> list[Family]:
    registry = CollectorRegistry()
    registry.register(FleetCollector(Fleet(1)))
    known = {name for name, *_ in of_services()}
    return [family for family in _families(registry) if family[0] not in known]


def of_pipelines() -> list[Family]:
    registry = CollectorRegistry()
    PipelineMetrics(registry)
    return _families(registry)


def _families(registry: CollectorRegistry) -> list[Family]:
    families = []
    for collector in list(registry._collector_to_names):
        for family in collector.collect():
            if family.name.startswith("millstream_"):
                name = f"{family.name}_total" if family.type == "counter" else family.name
                labels = getattr(collector, "_labelnames", None) or getattr(family, "_labelnames", ())
                families.append((name, family.type, _cell(family.documentation), tuple(labels)))
    return sorted(set(families))


PACKAGES = {
    "millstream": "The names that most programs import.",
    "messaging": "Messages, publishers, subscribers, routers, middleware, dead letters, retention.",
    "cqrs": "Commands and events: buses, marshalers, dependencies.",
    "assignment": "Streams that have one owner at a time.",
    "runner": "Worker processes of `millstream run`, and routers inside a web application.",
    "broker": "The contract, and the operations for `broker.run`.",
    "model": "Values: ids, entries, groups, policies, clocks.",
    "spark": "The data source `redis_streams`.",
    "cdc": "Changes of databases as Spark sources.",
    "pipelines": "Pipelines from YAML: loading, planning, running.",
    "observe": "Metrics, health, examinations.",
    "dashboard": "The dashboard as an ASGI application.",
    "server": "A RESP server for an embedded broker, as `millstream serve` runs it.",
    "testing": "For your tests: waiting, servers, faults, the conformance kit.",
}
"""The packages in the order of the reference; each page lists the public API of one package."""


def api(package: str) -> str:
    path = "millstream" if package == "millstream" else f"millstream.{package}"
    names = sorted(name for name in import_module(path).__all__ if not name.startswith("__"))
    lines = [f"# `{path}`", "", f"{PACKAGES[package]} Generated from the code: every public name of the package.", ""]
    lines += [f"::: {path}.{name}" for name in names]
    if package == "millstream":
        lines += ["", "## Errors", "", "::: millstream.errors"]
    return "\n".join(lines) + "\n"


IN_FLIGHT_PAGE = Path(__file__).parents[1] / "docs" / "explain" / "a-message-is-handled.md"
IN_FLIGHT_BEGIN = "<!-- The in-flight table: generated by scripts/make_reference.py -->"
IN_FLIGHT_END = "<!-- End of the in-flight table -->"


def in_flight_states() -> str:
    """The page about the path of a message, with the consumer's states and transitions as the code has them."""
    before, _, from_table = IN_FLIGHT_PAGE.read_text().partition(IN_FLIGHT_BEGIN)
    _, _, after = from_table.partition(IN_FLIGHT_END)
    transitions = list(all_transitions())
    lines = ["", "", "```mermaid", "stateDiagram-v2", "    [*] --> RECEIVED"]
    for state, event, new in transitions:
        if state is not new and not (new is State.RELEASED and state in UNSTARTED) and state is not State.RELEASED:
            lines.append(f"    {state.name} --> {new.name}: {event.name}")
    leaving = sorted({event.name for state, event, new in transitions if new is State.RELEASED and state in UNSTARTED})
    lines += ["    RELEASED --> [*]", "```", ""]
    lines += [f"States without a started handler ({', '.join(sorted(state.name for state in UNSTARTED))}) also"]
    lines += [
        f"go to RELEASED, by {', '.join(leaving)}. Events that do not change the state are in the table only.",
        "",
    ]
    lines += ["| state | meaning | event and next state |", "|---|---|---|"]
    for state in State:
        row = ", ".join(f"{event.name} → {new.name}" for source, event, new in transitions if source is state)
        lines.append(f"| {state.name} | {state.value} | {row} |")
    lines += ["", "| event | what happens to the entry |", "|---|---|"]
    lines += [f"| {event.name} | {event.value} |" for event in Event]
    return before + IN_FLIGHT_BEGIN + "\n".join(lines) + "\n\n" + IN_FLIGHT_END + after


PAGES: dict[str, Callable[[], str]] = {
    "../explain/a-message-is-handled.md": in_flight_states,
    "cli.md": command_line,
    "json.md": json_keys,
    "keys.md": keys,
    "options.md": options,
    "metrics.md": metrics,
}
PAGES |= {f"api/{package}.md": partial(api, package) for package in PACKAGES}


def main() -> int:
    stale = []
    for name, make in PAGES.items():
        path, text = REFERENCE / name, make()
        if "--check" in sys.argv:
            if not path.exists() or path.read_text() != text:
                stale.append(name)
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    if stale:
        print(f"out of date: {', '.join(stale)}. Run: python scripts/make_reference.py")
    return len(stale)


if __name__ == "__main__":
    sys.exit(main())
