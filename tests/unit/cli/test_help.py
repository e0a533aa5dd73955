"""Commands in help texts, warnings and the demo fit into a terminal of 80 columns without a break."""

from __future__ import annotations

import io
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.main
from rich.console import Console
from typer.testing import CliRunner

from millstream.cli import doctor, show
from millstream.cli.main import CHAPTERS, LEGEND, build
from millstream.demo.run import _next_steps
from millstream.testing.verify import PromiseResult


def every_command() -> Iterator[tuple[str, Any]]:
    """Each command by the words that call it, groups of commands among them."""
    for chapter in CHAPTERS:
        whole: Any = typer.main.get_command(build([chapter]))
        result = whole.commands[chapter]
        yield chapter, result
        yield from ((f"{chapter} {word}", command) for word, command in getattr(result, "commands", {}).items())


COMMANDS = dict(every_command())


def shown(*words: str) -> str:
    done = CliRunner().invoke(build(list(words)), [*words, "--help"], env={"COLUMNS": "80"})
    assert done.exit_code == 0
    assert all(len(line) <= 80 for line in done.output.splitlines())
    return done.output


@pytest.mark.parametrize("words", COMMANDS)
def test_commands_to_be_typed_are_neither_cut_nor_broken(words: str) -> None:
    output = shown(*words.split())

    assert [line for line in output.splitlines() if "…" in line] == []
    options = [
        parameter for parameter in COMMANDS[words].params if parameter.opts[0].startswith("-") and not parameter.hidden
    ]
    named = {name for parameter in options for name in (*parameter.opts, *parameter.secondary_opts)}
    assert named - set(re.split(r"[\s,]+", output)) == set()
    choices = [line for line in output.splitlines() if re.search(r"<[a-z][^>]*$", line)]
    assert choices == []


@pytest.mark.parametrize("words", COMMANDS)
def test_sentence_is_filled_to_the_end_of_the_line(words: str) -> None:
    """A line break of the source within a sentence would be seen in the middle of a line."""
    assert not re.search(r"\S\n\S", COMMANDS[words].help)


def test_help_lists_each_exit_code_once() -> None:
    output = re.sub(r"\s+", " ", shown())

    listed = output.partition("Exit codes: ")[2].partition(". ")[0].split("; ")
    assert listed == [f"{code} {meaning}" for code, meaning in LEGEND.items()]


def test_commands_of_the_demo_can_be_copied_from_a_narrow_terminal() -> None:
    written = io.StringIO()
    data = Path("/srv/a directory/of [people]/who nest them deeply/demo-data/20261116-172620")

    _next_steps(Console(file=written, width=80, force_terminal=True, color_system=None), None, data, "{demo-1}")

    lines = [shlex.split(line) for line in written.getvalue().splitlines() if line.startswith("  ")]
    assert ["millstream", "serve", "--dir", str(data / "broker")] in lines
    assert ["export", "MILLSTREAM_URL=redis://127.0.0.1:6380"] in lines
    assert ["millstream", "streams", "tail", "{demo-1}.done"] in lines
    assert {words[0] for words in lines} == {"millstream", "export"}


class NarrowTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("tell", [show.error, show.warning])
def test_long_message_is_wrapped_at_word_boundaries(tell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sentence = "warning: Pipelines need Spark, which is not installed. Install it: pip install 'millstream[spark]'"
    monkeypatch.setenv("COLUMNS", "80")
    terminal = NarrowTerminal()
    monkeypatch.setattr(sys, "stderr", terminal)

    tell(sentence)

    lines = re.sub(r"\x1b\[\d+m", "", terminal.getvalue()).splitlines()
    assert len(lines) == 2
    assert all(len(line) <= 80 for line in lines)
    assert " ".join(line.strip() for line in lines) == sentence


def test_failed_conformance_test_is_wrapped_at_word_boundaries(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = (
        "assert await broker.xadd(stream, fields, id='5-*') == EntryId(5, 5)  (ServerError: ERR Invalid stream ID)"
    )

    async def asked(*_: object) -> list[PromiseResult]:
        return [PromiseResult("writing", "an id may be given", failure, None)]

    terminal = NarrowTerminal()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr("millstream.cli.doctor._verify", asked)

    with pytest.raises(typer.Exit):
        doctor.verify(url="local://")

    output = re.sub(r"\x1b\[\d+m", "", terminal.getvalue()).splitlines()
    assert all(len(line) <= 80 for line in output)
    assert " ".join(line.strip() for line in output[1:-1]) == re.sub(r"\s+", " ", failure)
