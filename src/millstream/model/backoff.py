"""The one backoff: how long to wait before trying again. Every loop that waits after a failure uses it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """Growing, bounded, and never in step with others that failed at the same moment."""

    initial_ms: int = 200
    factor: float = 2.0
    max_ms: int = 60_000
    jitter: float = 0.2
    """A part of the delay, added or taken away at random, so that what failed together does not return together."""

    def delay_ms(self, attempt: int, chance: float) -> int:
        """After ``attempt`` failures, the first being 1; ``chance`` is a random number between 0 and 1. Pure."""
        # The exponent is bounded: factor ** 5000 would overflow long after the maximum was reached.
        grown = min(self.max_ms, self.initial_ms * self.factor ** min(max(0, attempt - 1), 64))
        return max(0, round(grown * (1 + self.jitter * (2 * chance - 1))))
