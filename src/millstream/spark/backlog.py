"""How much lies ahead of a query, asked from outside of it: Spark tells of a batch only when the batch is done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millstream.spark import plan
from millstream.spark.connection import reached_broker
from millstream.spark.offsets import BEGINNING, Offset, expected
from millstream.spark.options import source_options
from millstream.spark.survey import RedisSurvey


def backlog(options: Mapping[str, str], finished: Mapping[str, Any] | None) -> int | None:
    """How many entries the streams hold beyond ``finished``, an offset as Spark has logged it; None where nobody knows.

    Without one the query is at its first batch: then only ``earliest`` still says where that began.
    """
    asked = source_options(options, streaming=True)
    if finished is None and asked.starting != "earliest":
        return None
    survey = RedisSurvey(reached_broker(asked.address), asked)
    start = plan.first_offset(survey, asked, "latest") if finished is None else Offset.from_json(finished)
    return beyond(start, plan.latest_offset(survey))


def beyond(start: Offset, end: Offset) -> int | None:
    """The entries between the two, all of the end's streams together; None where one of them does not know."""
    counts = [expected(start.streams.get(name, BEGINNING), position) for name, position in end.streams.items()]
    known = [max(0, count) for count in counts if count is not None]  # less than none: the stream was made anew
    return sum(known) if len(known) == len(counts) else None
