"""Writes the pages under docs/reference that are made from the code: commands, JSON, options, metrics, keys, the API.

``python scripts/make_reference.py`` writes them; with ``--check`` it only says whether they are up to date.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from prometheus_client import CollectorRegistry
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from millstream import open_broker
from millstream.broker import Limits
from millstream.broker.keys import LEGEND
from millstream.broker.links.local import LocalAddress
from millstream.broker.links.targets import KEPT, OPTIONS
from millstream.cli.json_keys import ANSWERS, KINDS
from millstream.cli.main import CHAPTERS, build
from millstream.cli.main import LEGEND as EXITS
from millstream.messaging import Publisher, Subscriber
from millstream.messaging.settings import SubscriberSettings
from millstream.observe.metrics import StreamSurveyor
from millstream.observe.pipelines import PipelineMetrics
from millstream.observe.service import ServiceMonitor
from millstream.pipelines.processors import PROCESSORS
from millstream.pipelines.sinks import SINKS
from millstream.pipelines.sources import SOURCES
from millstream.pipelines.spec.pipeline import PipelineSpec

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"


def commands() -> Iterator[tuple[str, Any]]:
    """Every command by its full name, with what Click knows of it."""
    for name in CHAPTERS:
        whole: Any = typer.main.get_command(build([name]))
        chapter = whole.commands[name]
        below: dict[str, Any] = getattr(chapter, "commands", {})
        yield from ((f"{name} {word}", one) for word, one in below.items()) if below else [(name, chapter)]


def takes(command: Any, option: str) -> bool:
    return any(option in one.opts for one in command.params)


def command_line() -> str:
    found = dict(commands())
    without = {option: [name for name, one in found.items() if not takes(one, option)] for option in ("--url", "-o")}
    lines = [
        "# The command line",
        "",
        "Made from the code. `millstream COMMAND --help` tells what each option means.",
        "",
        f"Every command takes `--url` (or `MILLSTREAM_URL`), but for {_listed(without['--url'])}.",
        f"Every command takes `-o table|json` ([the keys](json.md)), but for {_listed(without['-o'])}.",
        "Both may also stand before the command: `millstream --url redis://db:6379 streams ls`.",
        "Tables are as wide as the terminal: numbers and ids stay whole, names are cut in the middle.",
        "",
        "| command | what it does |",
        "|---|---|",
    ]
    lines += [f"| `millstream {name}` | {chapter.help} |" for name, chapter in CHAPTERS.items()]
    lines += ["", "## Words and options", "", "| command | arguments | options |", "|---|---|---|"]
    for name, command in found.items():
        words = " ".join(one.name.upper() for one in command.params if one.param_type_name == "argument")
        options = [f"`{one.opts[0]}`" for one in command.params if one.param_type_name == "option" and not one.hidden]
        lines.append(f"| `{name}` | {words} | {', '.join(options)} |")
    lines += ["", "## Exit codes", "", "| code | means |", "|---|---|"]
    lines += [f"| {code} | {meaning} |" for code, meaning in EXITS.items()]
    lines += ["", "## Completion", "", "`millstream --install-completion` installs it for the shell that is running."]
    return "\n".join(lines) + "\n"


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def keys() -> str:
    lines = [
        "# Keys beside a stream",
        "",
        "Every companion of the stream `orders` is called `{orders}.<suffix>`, and lies",
        "in its slot. Made from the code.",
        "",
        "| suffix | holds | ends |",
        "|---|---|---|",
    ]
    lines += [f"| `{one.suffix}` | {one.holds} | {one.ends} |" for one in LEGEND]
    return "\n".join(lines) + "\n"


def json_keys() -> str:
    shapes = {"list": "a list of objects", "object": "one object", "lines": "an object a line"}
    lines = [
        "# What `-o json` prints",
        "",
        "Numbers are numbers, times are ISO 8601 in UTC, durations are milliseconds (`_ms`), sizes bytes (`_bytes`).",
        "A key that stands here stays; new ones may be added. Made from the code; a test holds every command to it.",
        "",
        "| kind | means |",
        "|---|---|",
    ]
    lines += [f"| {kind} | {meaning} |" for kind, meaning in KINDS.items()]
    lines += ["", "`?` behind a kind: it may be null."]
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
    lines = ["# Options and limits", "", "Made from the code: what may be given, and what holds where nothing is."]
    lines += ["Defaults of time are in milliseconds, of size in bytes.", ""]
    lines += ["## Of a URL", "", "| where streams live | behind the question mark |", "|---|---|"]
    local = [name for name in LocalAddress._fields if name not in ("name", "path")]
    lines += [f"| `local://`, `local:///path` | {_listed(local)} |", f"| servers | {_listed(list(OPTIONS))} |", ""]
    lines += [
        f"Of a client of redis-py these settings are taken: {_listed(list(KEPT))}, and where it connects to.",
        "Its timeouts, retries and decoding are the broker's own affair.",
        "",
    ]
    lines += ["## Limits", "", "`open_broker(url, limits=Limits(...))`.", "", *_documented(Limits)]
    lines += ["", "## `open_broker`", "", *_parameters(open_broker)]
    lines += ["", "## `Subscriber`", "", *_parameters(Subscriber, _sentences(SubscriberSettings))]
    lines += ["", "## `Publisher`", "", *_parameters(Publisher)]
    lines += ["", "## A pipeline's spec", "", "`millstream pipeline schema` prints the same as a JSON Schema.", ""]
    lines += ["| part | option | default |", "|---|---|---|", *_spec()]
    return "\n".join(lines) + "\n"


def _documented(kind: type) -> list[str]:
    """A dataclass's fields, with the sentence that stands below each."""
    texts = _sentences(kind)
    rows = [f"| `{name}` | {_shown(getattr(kind(), name))} | {texts.get(name, '')} |" for name in kind.__annotations__]
    return ["| option | default | what it is |", "|---|---|---|", *rows]


def _sentences(kind: type) -> dict[str, str]:
    [tree] = ast.parse(inspect.getsource(kind)).body
    assert isinstance(tree, ast.ClassDef), "a class"
    found = {}
    for one, below in zip(tree.body, tree.body[1:], strict=False):
        text = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else None
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and isinstance(text, str):
            found[one.target.id] = _cell(text)
    return found


def _parameters(function: Callable[..., Any], texts: Mapping[str, str] | None = None) -> list[str]:
    rows = []
    for name, one in inspect.signature(function).parameters.items():
        if one.kind is one.KEYWORD_ONLY:
            told = f" {texts.get(name, '')} |" if texts is not None else ""
            rows.append(f"| `{name}` | {'must be given' if one.default is one.empty else _shown(one.default)} |{told}")
    head = ["| option | default |", "|---|---|"]
    return [*(head if texts is None else ["| option | default | what it is |", "|---|---|---|"]), *rows]


def _spec() -> Iterator[str]:
    for name, info in PipelineSpec.model_fields.items():
        if isinstance(info.default, BaseModel):
            yield from _fields(f"`{name}`", type(info.default))
        elif name == "commit_policy":
            yield f"| the spec | `{name}` | {_shown(info.default)} |"
    for word, kinds in (("source", SOURCES), ("processor", PROCESSORS), ("sink", SINKS)):
        for name, kind in kinds.items():
            config = kind.model_fields.get("config")
            yield from _fields(f"{word} `{name}`", kind if config is None else config.annotation)


def _fields(part: str, model: Any) -> Iterator[str]:
    for name, info in model.model_fields.items():
        if name != "type":
            yield f"| {part} | `{info.alias or name}` | {_default(info)} |"


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "must be given"
    value = info.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, BaseModel):
        return ", ".join(f"{name} {_shown(getattr(value, name))}" for name in type(value).model_fields)
    return _shown(value)


def _shown(value: Any) -> str:
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
    lines = ["# Metrics", "", "Made from the code: each with the sentence that a scraper gets with it.", ""]
    for heading, families in (("Of a service", of_services()), ("Of pipelines", of_pipelines())):
        lines += [f"## {heading}", "", "| metric | kind | labels | tells |", "|---|---|---|---|"]
        lines += [f"| `{name}` | {kind} | {', '.join(labels)} | {text} |" for name, kind, text, labels in families]
        lines.append("")
    return "\n".join(lines)


Family = tuple[str, str, str, tuple[str, ...]]


def of_services() -> list[Family]:
    """As a monitor has them whose application asks for everything."""
    monitor = ServiceMonitor(port=None, per_consumer=True)
    registry = monitor.registry
    monitor.watch(own=lambda: True)
    monitor._statuses.look([], {})
    registry.register(StreamSurveyor(open_broker("local://reference"), ["*"], per_consumer=True))
    return _families(registry)


def of_pipelines() -> list[Family]:
    registry = CollectorRegistry()
    PipelineMetrics(registry)
    return _families(registry)


def _families(registry: CollectorRegistry) -> list[Family]:
    found = []
    for collector in list(registry._collector_to_names):
        for family in collector.collect():
            if family.name.startswith("millstream_"):
                name = f"{family.name}_total" if family.type == "counter" else family.name
                labels = getattr(collector, "_labelnames", None) or getattr(family, "_labelnames", ())
                found.append((name, family.type, _cell(family.documentation), tuple(labels)))
    return sorted(set(found))


ROOMS = {
    "millstream": "What most programs import.",
    "messaging": "Messages, publishers, subscribers, routers, middleware, dead letters, retention.",
    "cqrs": "Commands and events: buses, marshalers, dependencies.",
    "assignment": "Streams that have one owner at a time.",
    "runner": "Processes: what `millstream run` and `lifespan` are made of.",
    "broker": "The contract, and the steps that `broker.run` takes.",
    "model": "Values: ids, entries, groups, policies, clocks.",
    "spark": "The data source `redis_streams`.",
    "cdc": "Changes of databases as Spark sources.",
    "pipelines": "Pipelines from YAML: loading, planning, running.",
    "observe": "Metrics, health, examinations.",
    "testing": "For your tests: waiting, servers, faults, the conformance kit.",
}
"""The rooms in the order in which people meet them; each page lists what the room's door exports."""


def api(room: str) -> str:
    path = "millstream" if room == "millstream" else f"millstream.{room}"
    names = sorted(name for name in import_module(path).__all__ if not name.startswith("__"))
    lines = [f"# `{path}`", "", f"{ROOMS[room]} Made from the code: every name that the room exports.", ""]
    lines += [f"::: {path}.{name}" for name in names]
    if room == "millstream":
        lines += ["", "## Errors", "", "::: millstream.errors"]
    return "\n".join(lines) + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "cli.md": command_line,
    "json.md": json_keys,
    "keys.md": keys,
    "options.md": options,
    "metrics.md": metrics,
}
PAGES |= {f"api/{room}.md": partial(api, room) for room in ROOMS}


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
