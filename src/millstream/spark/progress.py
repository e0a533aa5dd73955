"""How far a query is: what it has finished, published as a consumer group's position, so that lag tools and safe
trimming see it; and how much lies ahead of it, asked from outside: Spark tells of a batch only when it is done."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from millstream.broker import BlockingBroker, groups
from millstream.model import MIN_ID
from millstream.spark import plan
from millstream.spark.connection import reached_broker
from millstream.spark.offsets import BEGINNING, Offset, StreamPosition, expected
from millstream.spark.options import source_options
from millstream.spark.survey import RedisSurvey, Survey

log = logging.getLogger("millstream.spark")


class GroupProgress:
    """Publishes each position once. Forward only, by the server's own comparison: a late call changes nothing."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._published: dict[str, StreamPosition] = {}

    def publish(self, survey: Survey, broker: BlockingBroker, finished: Offset) -> None:
        places = {name: position._replace(splits=(), origin=None) for name, position in finished.streams.items()}
        news = {name: place for name, place in places.items() if self._published.get(name) != place}
        for stream, info in survey.look(news).items():
            place = news[stream]
            if info is not None and info.last_generated < place.id:
                # The stream was made anew, with smaller ids. A group at the old one's end would never move again, and
                # safe trimming would take all that the new one holds for read.
                continue
            entries_read = place.added if place.exact else None
            moved = broker.run(groups.advance_group, stream, self._group, place.id, entries_read=entries_read)
            if moved or place.id > MIN_ID:  # else the stream may not exist yet: the group is made when it does
                self._published[stream] = place


def warn_without_group() -> None:
    log.warning(
        "option group is not set: lag tools and safe trimming cannot see this query, and entries may be trimmed before "
        "it has read them. Set group to a consumer group's name of its own."
    )


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
