"""The pages agree with the code: limits, options, commands, records, figures, extras, metrics.

There is a test for each kind of claim.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from benchmarks import Result
from millstream import Limits, open_broker
from millstream.broker.open import LOCAL_MAX_STREAM_LEN
from millstream.broker.transport.targets import CLIENT_OPTIONS, OPTIONS
from millstream.cdc.options import SHARED_OPTIONS
from millstream.cdc.postgres.database import POSTGRES_OPTIONS
from millstream.messaging import Publisher, RetentionPolicy, Subscriber
from millstream.messaging.consumer import in_flight, reader, reads, shard
from millstream.messaging.settings import RetentionOptions
from millstream.pipelines import PipelineStatus, json_schema
from millstream.pipelines.sinks import SINKS
from millstream.spark.options import SOURCE_OPTIONS
from millstream.spark.sink_options import SINK_OPTIONS

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from make_reference import commands, of_fleets, of_pipelines, of_services  # noqa: E402  # it is not part of the package
from write_figures import MISSED  # noqa: E402

OPTIONS_PAGE = "docs/reference/options.md"
CHANGE_OPTIONS = "Options of `postgres_changes` and `mariadb_changes`"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MIB = 1024 * 1024


def text_of(name: str) -> str:
    """A page as one line, so that line breaks do not matter."""
    return " ".join((ROOT / name).read_text().split())


def rows_of(name: str, heading: str) -> list[list[str]]:
    """The rows of the tables under a heading, as lists of cells."""
    part = (ROOT / name).read_text().split(f"\n{heading}\n", 1)[1].split("\n## ", 1)[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line[:1] == "|"]


# --- limits ---------------------------------------------------------------------------------------------------------


HANDLED = "docs/explain/a-message-is-handled.md"


def limits() -> list[tuple[str, str]]:
    """Sentences with numbers in them, made from the numbers that count."""
    own, redis = Limits(), SINKS["redis"].model_fields["config"].annotation
    assert redis is not None
    sink = {name: redis.model_fields[name].default for name in ("connect_timeout", "send_timeout", "batch_timeout")}
    seconds = {name: f"`{name}` ({value // 1000} s)" for name, value in sink.items()}
    return [
        (
            "docs/contract.md",
            f"an entry may hold {own.max_entry_bytes // MIB} MiB, an atomic batch {own.max_atomic_bytes // MIB} MiB; "
            f"a batch travels in chunks of {own.chunk_commands:,} commands or {own.chunk_bytes // 1024} KiB, "
            f"{own.chunks_ahead} of them under way; scripts take {own.script_entries:,} entries or "
            f"{own.script_bytes // MIB} MiB; opening and silence {own.connect_ms // 1000} s each",
        ),
        (HANDLED, f"| idle topics in one blocking read | {reader.SHARD_SIZE} |"),
        (HANDLED, f"| messages that one read of many topics may return | {reads.MAX_MESSAGES_PER_READ:,} |"),
        (HANDLED, f"that returned few messages | {shard.GATHER_MS} ms |"),
        (HANDLED, f"without permission for `CLIENT UNBLOCK` | {shard.UNWAKEABLE_BLOCK_MS} ms |"),
        (HANDLED, f"| hash slots of a Cluster that are read with blocking reads | {reader.WAITING_SLOTS} |"),
        (HANDLED, f"| topics of the other hash slots: pause after a read | {shard.POLL_GATHER_MS:.0f} ms |"),
        (HANDLED, f"reports no writes: longest interval between two polls | {shard.POLL_MS[1]:.0f} ms |"),
        (HANDLED, f"with more than 500 of these topics | {shard.POLL_MS_A_TOPIC} ms for each of them |"),
        (HANDLED, f"| deliveries of a claimed entry above which it is isolated | {in_flight.MAX_SHARED_DELIVERIES} |"),
        ("docs/contract.md", f"It is {LOCAL_MAX_STREAM_LEN:,} on `local://`"),
        ("docs/how-to/pipeline-sinks.md", f"the limit of an entry** ({own.max_entry_bytes // MIB} MiB"),
        *(("docs/how-to/pipeline-sinks.md", f"| {option} |") for option in seconds.values()),
        (
            "docs/how-to/spark.md",
            f"another connection is tried | {own.connect_ms}, {own.answer_ms} |",
        ),
    ]


@pytest.mark.parametrize(("page", "sentence"), limits())
def test_a_limit_on_a_page_is_the_one_in_the_code(page: str, sentence: str) -> None:
    assert sentence in text_of(page)


# --- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("head", "known"), [("source", SOURCE_OPTIONS), ("sink", SINK_OPTIONS)])
def test_spark_s_options_are_those_of_its_page(head: str, known: tuple[str, ...]) -> None:
    result: dict[str, set[str]] = {}
    for row in rows_of("docs/how-to/spark.md", "## Options"):
        if row[1:2] == ["meaning"]:
            names = result.setdefault(row[0], set())
        elif not row[0].startswith("---"):
            names |= set(re.findall(r"`([A-Za-z]+)`", row[0]))
    assert result[head] == set(known)


def test_options_of_change_sources_are_those_of_the_options_page() -> None:
    listed = {
        title: {name for row in rows_of(OPTIONS_PAGE, f"## {title}")[2:] for name in re.findall(r"`(\w+)`", row[0])}
        for title in (CHANGE_OPTIONS, "Further options of `postgres_changes`", "Further options of `mariadb_changes`")
    }
    assert list(listed.values()) == [set(SHARED_OPTIONS), set(POSTGRES_OPTIONS), {"serverId"}]


def test_each_spelling_of_a_concept_exists() -> None:
    schema = json_schema()
    in_yaml = {name for part in schema["$defs"].values() for name in part.get("properties", {})}
    in_python = set(RetentionOptions.__annotations__).union(
        *(re.findall(r"`(\w+)`", row[0]) for row in rows_of(OPTIONS_PAGE, "## Limits")),
        *(inspect.signature(kind).parameters for kind in (open_broker, Subscriber, Publisher, RetentionPolicy)),
    )
    in_spark = {*SOURCE_OPTIONS, *SINK_OPTIONS, *SHARED_OPTIONS}
    unknown = [
        name
        for _, python, yaml, _, spark in rows_of(OPTIONS_PAGE, "## One concept, several spellings")[2:]
        for cell, names in ((python, in_python), (yaml, in_yaml), (spark, in_spark))
        for name in re.findall(r"`(\w+)`", cell)
        if name not in names
    ]
    assert not unknown


def test_the_contract_says_which_settings_of_a_redis_py_client_are_taken() -> None:
    [row] = [row for row in rows_of("docs/contract.md", "## Where streams live") if row[0] == "a client of redis-py"]
    listed = set(re.findall(r"`([a-z_]+)`", row[1]))
    assert listed == {name for name in CLIENT_OPTIONS if not name.startswith("ssl_")} | {"ssl_"}, (
        "ssl_ stands for all of them"
    )


def test_an_option_of_a_url_on_any_page_exists() -> None:
    known = {*OPTIONS, "appendfsync", "maxmemory"}
    unknown = [
        f"{page.relative_to(ROOT)}: {name}"
        for page in PAGES
        for query in re.findall(r"(?:local|rediss?|unix)(?:\+\w+)?://[^\s`\"'|?]*\?([^\s`\"'|)]+)", page.read_text())
        for name in re.findall(r"(?:^|&)([a-z_]+)=", query)
        if name not in known
    ]
    assert not unknown


# --- commands -------------------------------------------------------------------------------------------------------

FLAGS_OF_OTHERS = {
    "--install-completion": "Typer's own",
    "--help": "Click's own",
    "--version": "Click's own",
    "--check": "of scripts/make_reference.py, and of run",
}
"""Options on our pages that are not of a command of ours."""


def in_code(page: Path) -> str:
    """The code on a page, inline and in blocks."""
    text = page.read_text()
    blocks = re.findall(r"^```(?:bash|text|console)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return "\n".join([*blocks, *re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))])


def test_a_command_on_a_page_exists_with_its_options() -> None:
    known = dict(commands())
    chapters = {name.split()[0] for name in known}
    wrong = []
    for page in PAGES:
        for line in re.findall(r"(?:^|[ (;])millstream ([a-z].*)$", in_code(page), re.MULTILINE):
            words = line.split()
            if words[0] not in chapters:
                continue  # "millstream" as the package's name, in a path or a sentence
            command = known.get(" ".join(words[:2])) or known.get(words[0])
            if command is None:
                if len(words) > 1 and re.fullmatch(r"[a-z][a-z-]*", words[1]):
                    wrong.append(f"{page.relative_to(ROOT)}: millstream {line}")
                continue
            options = {
                option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)
            }
            used = {word.partition("=")[0] for word in words if re.fullmatch(r"--[a-z][a-z-]*(=.*)?", word)}
            wrong += [
                f"{page.relative_to(ROOT)}: millstream {line}: {option}" for option in used - options - {"--help"}
            ]
    assert not wrong


def test_an_option_that_a_page_names_alone_is_of_some_command() -> None:
    known = {
        option for _, command in commands() for each in command.params for option in each.opts
    } | FLAGS_OF_OTHERS.keys()
    wrong = [
        f"{page.relative_to(ROOT)}: {name}"
        for page in PAGES
        for name in re.findall(r"`(--[a-z][a-z-]+)", page.read_text())
        if name not in known
    ]
    assert not wrong


# --- records --------------------------------------------------------------------------------------------------------


def test_the_record_of_a_pipeline_is_the_one_on_its_page() -> None:
    rows = rows_of("docs/how-to/pipeline-operation.md", "### The record of a pipeline")[2:]
    assert [row[0].strip("`") for row in rows] == [field.name for field in fields(PipelineStatus)]


# --- figures --------------------------------------------------------------------------------------------------------


def test_a_goal_that_was_missed_is_named_as_missed() -> None:
    figures = (ROOT / "README.md").read_text().split("<!-- figures -->")[1].split("<!-- end of figures -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in figures.splitlines() if "`" in line]
    assert len(rows) > 20
    for name, ours, unit, peer, peers, _, goal in rows:
        value, other = (None if text == "-" else float(text.replace(",", "")) for text in (ours, peers))
        assert value is not None
        stated = Result(name, value, unit, peer, other, goal.removesuffix(MISSED))
        assert goal.endswith(MISSED) == (stated.reached is False), name


# --- extras ---------------------------------------------------------------------------------------------------------

IMPORTED_BY_OTHERS = {
    "pandas": "PySpark's Connect client",
    "grpcio": "PySpark's Connect client",
    "grpcio-status": "PySpark's Connect client",
    "googleapis-common-protos": "PySpark's Connect client",
    "zstandard": "PySpark's Connect client",
}
MODULES = {
    "mysql-replication": "pymysqlreplication",
    "opentelemetry-api": "opentelemetry",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry",
    "opentelemetry-sdk": "opentelemetry",
}
"""Packages whose module has another name."""


def extras() -> dict[str, list[str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    result: dict[str, list[str]] = project["optional-dependencies"]
    return {name: [re.split(r"[\[<>=!~; ]", need)[0] for need in needs] for name, needs in result.items()}


def imported() -> set[str]:
    """The names of the modules that the product imports, anywhere."""
    result: set[str] = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                result |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                result.add(node.module.split(".")[0])
    return result


def test_every_dependency_of_an_extra_is_imported() -> None:
    ours = imported()
    idle = [
        f"{extra}: {package}"
        for extra, needs in extras().items()
        for package in needs
        if extra != "all" and package not in IMPORTED_BY_OTHERS and MODULES.get(package, package) not in ours
    ]
    assert not idle


def test_extra_all_contains_every_other_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [everything] = project["optional-dependencies"]["all"]
    assert set(re.findall(r"[a-z]+", everything.partition("[")[2])) == extras().keys() - {"all"}


def test_extras_on_pages_and_in_messages_exist_and_each_is_on_a_page() -> None:
    places = [*PAGES, ROOT / "CHANGELOG.md", *sorted((ROOT / "src").rglob("*.py"))]
    named: dict[str, str] = {}
    for path in places:
        for group in re.findall(r"millstream\[([a-z,]+)\]", path.read_text()):
            named |= {name: str(path.relative_to(ROOT)) for name in group.split(",")}
    assert not {name: where for name, where in named.items() if name not in extras()}
    pages = " ".join(page.read_text() for page in PAGES)
    assert not [name for name in extras() if not re.search(rf"millstream\[[a-z,]*\b{name}\b", pages)]


# --- metrics --------------------------------------------------------------------------------------------------------


def test_every_metric_on_a_page_exists() -> None:
    """Every name is in the reference, with its help, because that page is made from the code."""
    known = {name.removeprefix("millstream_") for name, *_ in (*of_services(), *of_fleets(), *of_pipelines())}
    endings = ("total", "seconds", "entries", "bytes", "ratio", "status", "events", "ts")
    mentioned = {
        (str(page.relative_to(ROOT)), name)
        for page in PAGES
        if page.name not in ("events.md", "metrics.md", "options.md", "cli.md")
        for name in re.findall(r"millstream_([a-z0-9_]+)", page.read_text())
        if name.rpartition("_")[2] in endings or f"millstream_{name}{{" in page.read_text()
    }
    pages = ("docs/how-to/observability.md", "docs/how-to/pipeline-operation.md")
    for page, heading in ((page, "## Metrics") for page in pages):
        for row in rows_of(page, heading):
            names = re.findall(r"`([a-z0-9_]{4,})(?:\{[a-z,]+\})?`", row[0])
            mentioned |= {(page, name.removeprefix("millstream_")) for name in names}
    assert len(mentioned) > 50
    assert not {(page, name) for page, name in mentioned if name not in known}


def test_every_metric_of_a_pipeline_is_on_the_page_of_pipelines_or_of_its_source() -> None:
    pages = text_of("docs/how-to/pipeline-operation.md") + text_of("docs/how-to/postgres.md")
    assert not [name for name, *_ in of_pipelines() if name.removeprefix("millstream_") not in pages]


def test_every_metric_has_a_sentence() -> None:
    assert not [
        name for name, _, text, _ in (*of_services(), *of_fleets(), *of_pipelines()) if not re.search(r"\w.*\.$", text)
    ]


# --- guarantees -----------------------------------------------------------------------------------------------------


def test_each_test_in_the_table_of_guarantees_exists_with_its_number_of_trials() -> None:
    rows = rows_of("docs/explain/delivery-guarantees.md", "## Faults that the tests inject")[2:]
    assert len(rows) > 10
    for _, _, trials, test in rows:
        path, _, function = test.strip("`").partition("::")
        source = (ROOT / path).read_text()
        functions = {
            node.name for node in ast.parse(source).body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        }
        assert function in functions, test
        default = re.search(r'os\.environ\.get\("TRIALS", "(\d+)"\)', source)
        assert trials == (default[1] if default else "-"), test


def test_each_test_in_the_table_of_the_consumer_s_guarantees_exists() -> None:
    rows = rows_of("docs/explain/a-message-is-handled.md", "## Guarantees and their tests")[2:]
    assert len(rows) > 15
    for _, test in rows:
        path, _, function = test.strip("`").partition("::")
        assert f"def {function}(" in (ROOT / path).read_text(), test


def test_each_test_file_that_a_page_names_exists() -> None:
    missing = [
        f"{page.relative_to(ROOT)}: {name}"
        for page in PAGES
        for name in re.findall(r"`(tests/[\w/]+(?:\.py)?)", page.read_text())
        if not (ROOT / name).exists()
    ]
    assert not missing
