"""The help of every command on a terminal of 80 columns: whatever must be typed stands there whole."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from millstream.cli.main import CHAPTERS, LEGEND, build


def every_command() -> Iterator[tuple[str, Any]]:
    """Each command by the words that call it, groups of commands among them."""
    for chapter in CHAPTERS:
        whole: Any = typer.main.get_command(build([chapter]))
        found = whole.commands[chapter]
        yield chapter, found
        yield from ((f"{chapter} {word}", command) for word, command in getattr(found, "commands", {}).items())


COMMANDS = dict(every_command())


def shown(*words: str) -> str:
    done = CliRunner().invoke(build(list(words)), [*words, "--help"], env={"COLUMNS": "80"})
    assert done.exit_code == 0
    assert all(len(line) <= 80 for line in done.output.splitlines())
    return done.output


@pytest.mark.parametrize("words", COMMANDS)
def test_whatever_is_to_be_typed_is_neither_cut_nor_broken(words: str) -> None:
    told = shown(*words.split())

    assert [line for line in told.splitlines() if "…" in line] == []
    options = [one for one in COMMANDS[words].params if one.opts[0].startswith("-") and not one.hidden]
    named = {name for one in options for name in (*one.opts, *one.secondary_opts)}
    assert named - set(re.split(r"[\s,]+", told)) == set()
    choices = [line for line in told.splitlines() if re.search(r"<[a-z][^>]*$", line)]
    assert choices == []


@pytest.mark.parametrize("words", COMMANDS)
def test_a_sentence_goes_on_to_the_end_of_the_line(words: str) -> None:
    """A line break of the source within a sentence would be seen in the middle of a line."""
    assert not re.search(r"\S\n\S", COMMANDS[words].help)


def test_each_exit_code_stands_between_semicolons_with_its_one_meaning() -> None:
    told = re.sub(r"\s+", " ", shown())

    listed = told.partition("Exit codes: ")[2].partition(". ")[0].split("; ")
    assert listed == [f"{code} {meaning}" for code, meaning in LEGEND.items()]
