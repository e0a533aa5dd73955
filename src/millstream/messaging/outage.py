"""An outage of the broker, told once when it begins and once when it ends, however often it is tried in between."""

from __future__ import annotations

import logging

from millstream.model import Observer, monotonic_ms

log = logging.getLogger(__name__)


class Outage:
    """Belongs to one publisher or subscriber. Topics fail and work; the outage lasts while any of them fails."""

    def __init__(self, what: str, observer: Observer) -> None:
        """``what``: what cannot be done meanwhile, as a verb: "publish", "read"."""
        self._what = what
        self._observer = observer
        self._failing: set[str] = set()
        self._began_ms = 0.0

    def failed(self, topic: str, error: Exception) -> None:
        if not self._failing:
            self._began_ms = monotonic_ms()
            log.warning("cannot %s (first seen on %s), trying again until it works: %s", self._what, topic, error)
            self._observer("messaging.outage_began", what=self._what, topic=topic, error=str(error))
        self._failing.add(topic)

    def worked(self, topic: str) -> None:
        """Also for a topic that nobody will try again."""
        if topic not in self._failing:
            return
        self._failing.discard(topic)
        if not self._failing:
            seconds = (monotonic_ms() - self._began_ms) / 1000
            log.warning("can %s again, after %.1f s", self._what, seconds)
            self._observer("messaging.outage_ended", what=self._what, seconds=seconds)
