"""What Spark has finished, published as a consumer group's position: lag tools and safe trimming see the reader."""

from __future__ import annotations

import logging

from millstream.broker.broker import BlockingBroker
from millstream.model import MIN_ID
from millstream.spark.offsets import Offset, Position
from millstream.spark.survey import Survey

log = logging.getLogger("millstream.spark")


class GroupProgress:
    """Publishes each position once. Forward only, by the server's own comparison: a late call changes nothing."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._published: dict[str, Position] = {}

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
            moved = broker.advance_group(stream, self._group, place.id, entries_read=entries_read)
            if moved or place.id > MIN_ID:  # else the stream may not exist yet: the group is made when it does
                self._published[stream] = place


def warn_without_group() -> None:
    log.warning(
        "option group is not set: lag tools and safe trimming cannot see this query, and entries may be trimmed before "
        "it has read them. Set group to a consumer group's name of its own."
    )
