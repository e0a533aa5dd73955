"""The options that every command shares, under the same names everywhere."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer


class OutputKind(StrEnum):
    table = "table"
    json = "json"


Url = Annotated[
    str,
    typer.Option("--url", envvar="MILLSTREAM_URL", show_default=True, help="Where the streams live."),
]
Output = Annotated[OutputKind, typer.Option("--output", "-o", help="A table for people, or JSON for programs.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask; needed where nobody can answer.")]

MOST_SECONDS = 1e9
"""Thirty years: infinity is no number of seconds that a server or a clock could take."""
DEFAULT_URL = "redis://127.0.0.1:6379"
