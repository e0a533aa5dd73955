"""The delivery ledger: what was sent, what was confirmed, what arrived. At the end it says what is wrong, in words."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Balance:
    """``lost``: confirmed to the sender, and never arrived. ``unheard``: arrived, although the sender never heard that
    it was stored: physics, no fault. ``duplicated``: arrived more than once. ``invented``: arrived, never sent."""

    sent: int
    confirmed: int
    arrived: int
    lost: frozenset[Hashable]
    unheard: frozenset[Hashable]
    duplicated: dict[Hashable, int]
    invented: frozenset[Hashable]

    @property
    def nothing_lost(self) -> bool:
        return not self.lost and not self.invented

    @property
    def exactly_once(self) -> bool:
        return self.nothing_lost and not self.duplicated

    def __str__(self) -> str:
        return (
            f"sent {self.sent}, confirmed {self.confirmed}, arrived {self.arrived}, lost {len(self.lost)}, "
            f"unheard {len(self.unheard)}, duplicated {len(self.duplicated)}, invented {len(self.invented)}"
        )


class DeliveryLedger:
    """Thread-safe. A message is known by any hashable token that travels with it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: set[Hashable] = set()
        self._confirmed: set[Hashable] = set()
        self._arrived: Counter[Hashable] = Counter()

    def sending(self, *tokens: Hashable) -> None:
        """Before the call that sends them."""
        with self._lock:
            self._sent.update(tokens)

    def confirmed(self, *tokens: Hashable) -> None:
        """After the broker has answered."""
        with self._lock:
            self._confirmed.update(tokens)

    def arrived(self, *tokens: Hashable) -> None:
        """Where they are finished with: after the acknowledgement, or found in the stream."""
        with self._lock:
            self._arrived.update(tokens)

    def missing(self) -> set[Hashable]:
        """Confirmed, and not there yet: what a test waits for to become empty."""
        with self._lock:
            return self._confirmed - self._arrived.keys()

    def balance(self, found: Iterable[Hashable] | None = None) -> Balance:
        """The account. ``found`` replaces what was noted as arrived, for instance by what a stream holds."""
        with self._lock:
            arrived = self._arrived if found is None else Counter(found)
            return Balance(
                sent=len(self._sent),
                confirmed=len(self._confirmed),
                arrived=sum(arrived.values()),
                lost=frozenset(self._confirmed - arrived.keys()),
                unheard=frozenset((arrived.keys() & self._sent) - self._confirmed),
                duplicated={token: count for token, count in arrived.items() if count > 1},
                invented=frozenset(arrived.keys() - self._sent),
            )
