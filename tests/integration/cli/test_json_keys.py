"""``-o json`` of every command: the documented keys and no others, and values of the documented kinds."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import typer

from millstream import open_blocking_broker
from millstream.assignment import Announcement, announce_stream
from millstream.cli.json_keys import ANSWERS, KINDS, Answer
from millstream.cli.main import CHAPTERS, build, main
from millstream.messaging.failure import DeadLetterDetails, dead_letter_fields
from millstream.pipelines import Checkpoint, load_pipeline
from millstream.pipelines.dead_letters import ReplayResult
from millstream.pipelines.plan import make_plan

LONG = "orders.eu-central-1.customer-000000000042.events"
KIND: dict[str, Callable[[Any], bool]] = {
    "name": lambda value: isinstance(value, str),
    "text": lambda value: isinstance(value, str),
    "id": lambda value: isinstance(value, str) and re.fullmatch(r"\d+-\d+", value) is not None,
    "time": lambda value: re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", str(value)) is not None,
    "count": lambda value: type(value) is int,
    "number": lambda value: type(value) in (int, float),
    "ms": lambda value: type(value) is int,
    "bytes": lambda value: type(value) is int,
    "flag": lambda value: type(value) is bool,
    "fields": lambda value: isinstance(value, dict) and all(isinstance(each, str) for each in value.values()),
    "object": lambda value: isinstance(value, dict),
    "names": lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value),
    "any": lambda value: True,
}

LINES = """
streams ls
streams describe S
streams tail S
streams add other a=1
streams del S 1700000000000-9
streams trim S --max-len 100
groups ls
groups describe S g
groups create S another --start 0
groups reset S another --to-latest
consumers ls S
pending ls S
pending ls S --entries
pending claim S g w2 1700000000000-0 --idle 0
pending ack S g 1700000000000-1
consumers reap S g --idle 0 --to w3
dlq ls
dlq ls S :dlq ls STREAM
dlq show S 1700000000500-0
dlq errors S
dlq purge S --dry-run
dlq replay S --id 1700000000500-0
dlq purge S
retention ls
retention apply S --max-len 1
assignments ls svc
assignments announce svc data-2
assignments release svc data-1
pipeline ls
pipeline validate shop.yaml
pipeline plan shop.yaml
pipeline status shop.yaml
pipeline checkpoints shop.yaml
pipeline replay-dead-letters shop.yaml
pipeline reset shop.yaml
run worker:router --check
top --interval 0.2
doctor S
doctor
migrate --from EMBEDDED --to EMPTY
groups rm S g
streams rm S
"""
ELSEWHERE = {"verify", "pipeline prepare"}
"""They take long, and their keys are tested where they run: test_verify.py, test_prepared_start.py."""
WITHOUT_JSON = {
    "pipeline schema",
    "pipeline run",
    "retention run",
    "serve",
    "dashboard",
    "demo",
    "init",
    "observe export",
}
"""They print a schema, run until they are stopped, write files, or report progress."""


def problems(kind: Any, value: Any, at: str = "") -> Iterator[str]:
    if isinstance(kind, list):
        for each in value:
            yield from problems(kind[0], each, f"{at}[]")
    elif isinstance(kind, dict):
        if kind.keys() != value.keys():
            yield f"{at}: keys {sorted(value)} and not {sorted(kind)}"
        for key in kind.keys() & value.keys():
            yield from problems(kind[key], value[key], f"{at}.{key}")
    elif not (kind.endswith("?") and value is None) and not KIND[kind.removesuffix("?")](value):
        yield f"{at}: {value!r} is no {kind}"


def assert_as_documented(command: str, printed: str) -> None:
    """Checks the output of one command, which must not be empty."""
    answer = ANSWERS[command]
    result = read(answer, printed)
    assert result
    assert [problem for each in result for problem in problems(answer.keys, each)] == []


def read(answer: Answer, printed: str) -> list[Any]:
    if answer.shape == "lines":
        return [json.loads(line) for line in printed.splitlines()]
    value = json.loads(printed)
    assert isinstance(value, list if answer.shape == "list" else dict)
    return value if answer.shape == "list" else [value]


@pytest.fixture
def here(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a pipeline and a worker, and a Redis with objects of every kind."""
    monkeypatch.setenv("MILLSTREAM_URL", redis_url)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "shop.yaml").write_text(
        "apiVersion: millstream/v1\nkind: Pipeline\nmetadata: {name: shop}\nspec:\n"
        "  source: {type: generator, config: {rows: 10}}\n"
        "  sinks: [{type: redis, config: {id: out, uri: 'redis://127.0.0.1:1', stream: out}}]\n"
    )
    (tmp_path / "worker.py").write_text(
        "from millstream import Message, Router\n\nrouter = Router()\n\n\n"
        "@router.on('jobs', group='g', group_start='0')\nasync def work(message: Message) -> None: ...\n"
    )
    # Running Spark is tested in tests/spark; here it would only take time.
    monkeypatch.setattr(
        "millstream.pipelines.session.start_session", lambda *_, **__: SimpleNamespace(stop=lambda: None)
    )
    monkeypatch.setattr("millstream.pipelines.dead_letters.replay_dead_letters", lambda *_, **__: ReplayResult(2, 0))
    with open_blocking_broker(f"local://{tmp_path}/embedded") as embedded:
        embedded.xadd("kept", {"n": 1})
    Checkpoint(tmp_path / "checkpoints/default/shop").open(make_plan(load_pipeline(tmp_path / "shop.yaml")))
    with open_blocking_broker(redis_url) as broker:
        for n in range(10):
            broker.xadd(LONG, {"n": n}, id=f"1700000000000-{n}")
        broker.create_group(LONG, "g", start="0")
        broker.xreadgroup(LONG, "g", "w1", count=3)
        details = DeadLetterDetails(LONG, "1-1", "g", "w1", 5, "order 7 not found", "LookupError", "Traceback", 1)
        for n in range(3):
            broker.xadd(f"{{{LONG}}}.dlq", dead_letter_fields({b"payload": b"x"}, details), id=f"17000000005{n:02}-0")
        announce_stream(broker, "svc", Announcement("data-1", {"tenant": "a"}))
        broker.create_group("svc-input", "svc-group", start="0")
    return tmp_path


def test_every_command_prints_the_keys_and_kinds_that_are_documented(
    here: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checked = set()
    stands_for = {"S": LONG, "EMBEDDED": f"local://{here}/embedded", "EMPTY": f"{redis_url}/9"}
    wrong = []
    for line in LINES.strip().splitlines():
        typed, _, named = line.partition(" :")
        words = [stands_for.get(word, word) for word in typed.split()]
        if words[1:2] and words[1] in ("del", "trim", "rm", "ack", "reap", "reset", "purge", "release"):
            words += ["--yes"]
        key = named or next(key for key in sorted(ANSWERS, key=len, reverse=True) if set(key.split()) <= set(words))
        monkeypatch.setattr("sys.argv", ["millstream", *words, "-o", "json"])
        with pytest.raises(SystemExit) as ended:
            main()
        printed, output = capsys.readouterr()
        assert ended.value.code in (0, None, 7), f"{line}: {output}"
        result = read(ANSWERS[key], printed)
        assert result or key in ("pipeline checkpoints",), f"{line} shows nothing: {output}"
        wrong += [f"{line}: {problem}" for each in result for problem in problems(ANSWERS[key].keys, each)]
        checked.add(key)
    assert not wrong
    assert ANSWERS.keys() - checked == ELSEWHERE


def commands() -> Iterator[tuple[str, click.Command]]:
    for name, chapter in CHAPTERS.items():
        result = typer.main.get_command(build([name])).commands[name]  # type: ignore[attr-defined]  # it is a group
        if chapter.is_group:
            yield from ((f"{name} {word}", command) for word, command in result.commands.items())
        else:
            yield name, result


def test_every_command_that_takes_json_is_documented() -> None:
    for name, command in commands():
        if command.hidden:
            continue
        takes = any("-o" in parameter.opts for parameter in command.params)
        documented = any(key == name or key.startswith(f"{name} ") for key in ANSWERS)
        assert takes == documented == (name not in WITHOUT_JSON), name


def test_every_output_kind_is_explained() -> None:
    assert KINDS.keys() == KIND.keys()
