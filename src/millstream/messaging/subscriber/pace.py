"""What the reading loop does next, decided from values and the time alone. Pure: the loop only obeys."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from millstream.messaging.settings import SubscriberSettings
from millstream.model import MIN_ID, EntryId

FIRST = b"0-0"
MAX_SCAN = 1000
"""Entries of the pending list that one step looks at: about a millisecond of the server's time."""
REST_FACTOR = 60
"""After a page that took t the next one rests 60 t: looking for the abandoned costs 2 % of the reading at most, and
a million pending entries are still gone through in a minute or two."""
RECOVERING_BLOCK_MS = 20
"""How long a read waits while more is to be recovered as soon as there is room for it."""


class Step(Enum):
    WAIT = auto()
    """The book is full."""
    OWN = auto()
    """Entries that the group believes this consumer holds, and that are not in its book."""
    SWEEP = auto()
    """Entries whose holders gave no sign of life."""
    READ = auto()
    """New entries."""


@dataclass(slots=True)
class Scan:
    """One way through the pending list, page by page."""

    cursor: bytes = FIRST
    next_at_ms: float = 0.0
    active: bool = True

    def restart(self) -> None:
        self.cursor = FIRST
        self.next_at_ms = 0.0
        self.active = True


class Pace:
    """The loop's memory of when it did what. Times are monotonic milliseconds."""

    def __init__(self, settings: SubscriberSettings) -> None:
        self._settings = settings
        self.own = Scan()
        self.sweep = Scan()
        self._entry_bytes = 0.0
        """A running mean of what entries weigh: it turns the bound in bytes into one in entries before reading."""

    def next_step(self, now_ms: float, room: int, probation_room: int) -> Step:
        """Own entries first, then a page of the abandoned, then new ones: so no load can starve recovery."""
        if room <= 0:
            return Step.WAIT
        if probation_room > 0:
            if self.own.active:
                return Step.OWN
            if now_ms >= self.sweep.next_at_ms:
                return Step.SWEEP
        return Step.READ

    def own_page(self, cursor: bytes, finished: bool) -> None:
        self.own.cursor = cursor
        self.own.active = not finished

    def sweep_page(self, started_ms: float, now_ms: float, cursor: bytes, finished: bool, *, took: int) -> None:
        """A round that found something goes on at once; one that finished rests for the interval."""
        self.sweep.cursor = FIRST if finished else cursor
        if finished:
            self.sweep.next_at_ms = now_ms + self._settings.claim_interval_ms
        elif took:
            self.sweep.next_at_ms = now_ms
        else:
            self.sweep.next_at_ms = now_ms + REST_FACTOR * (now_ms - started_ms)

    def read_count(self, room: int, room_bytes: int) -> int:
        """How many to ask for: bounded by room, and by bytes as far as past entries tell."""
        count = min(self._settings.count, room)
        if self._entry_bytes > 0:
            count = min(count, int(room_bytes / self._entry_bytes))
        return max(1, count)

    def weigh(self, entries: int, size: int) -> None:
        if entries:
            mean = size / entries
            self._entry_bytes += (mean - self._entry_bytes) * 0.3

    def read_block_ms(self, now_ms: float) -> int:
        """No longer than until the next page of the sweep is due: then nothing has to interrupt a read."""
        until_sweep = self.sweep.next_at_ms - now_ms
        if self.own.active or until_sweep < RECOVERING_BLOCK_MS:
            return min(self._settings.read_block_ms, RECOVERING_BLOCK_MS)
        return min(self._settings.read_block_ms, int(until_sweep))

    def scan_size(self, room: int) -> int:
        """A page in proportion to what may be taken from it."""
        return min(MAX_SCAN, max(100, room * 10))


def restart_point(oldest_held: EntryId | None, last_delivered: EntryId, last_generated: EntryId) -> EntryId:
    """After which id a group that vanished shall read again, as far as this process can tell.

    Just before its oldest entry that is not acknowledged, else after the last one it was given. Where the stream's
    own last id lies before that, the stream itself was replaced (FLUSHALL, a replica that lagged): everything in it
    is new. So there may be duplicates, never loss.
    """
    if last_generated < last_delivered:
        return MIN_ID
    if oldest_held is None:
        return last_delivered
    return min(last_delivered, oldest_held.previous()) if oldest_held > MIN_ID else MIN_ID
