"""Whose fault an error is: Spark runs processors and sinks as one job, so a processor's error comes out of a sink's
attempt. Pure: what is known arrives as text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from millstream.pipelines.backoff import CONDITION, short
from millstream.pipelines.plan import Placed
from millstream.pipelines.processors import Sql

_FROM_A_TASK = re.compile(r"ProcessorFailed: processor (.+?) failed: (.*?)(?:\. The batch is not committed|$)", re.M)
_SQL_CONTEXT = re.compile(r"^== SQL[^\n]*==\n(.+?)(?:^\s*\^|\Z)", re.M | re.S)


class Blame(NamedTuple):
    processor: str
    why: str


def blame(error: BaseException, placed: Sequence[Placed], *, sink_involved: bool) -> Blame | None:
    """The processor that failed for good, and why; None where it was none of them, or is not certain.

    A sink has expressions of its own. Where none was involved, an error in data is some processor's, even where the
    text does not say whose.
    """
    text = str(error)
    told = _FROM_A_TASK.search(text)
    if told is not None:
        return Blame(told[1], told[2].strip())
    condition = CONDITION.search(text)
    if condition is None:
        return None
    guilty = [each for each in placed if isinstance(each.processor, Sql) and _quotes(text, each.processor.query)]
    if not guilty and sink_involved:
        return None
    names = [called(each) for each in guilty or placed]
    if not names:
        return None
    return Blame(names[0] if len(names) == 1 else f"(one of {', '.join(names)})", condition[0])


def called(placed: Placed) -> str:
    return f"{placed.name!r} ({placed.processor.kind_name})"


def cause(error: BaseException) -> str:
    condition = CONDITION.search(str(error))
    return short(error) if condition is None else condition[0]


def _quotes(text: str, query: str) -> bool:
    """Whether the piece of SQL that Spark shows with its error stands in this query."""
    lines = [line.strip() for found in _SQL_CONTEXT.findall(text) for line in found.splitlines()]
    return any(line and line in query for line in lines)
