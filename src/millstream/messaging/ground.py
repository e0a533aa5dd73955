"""The logger and the clock of this room."""

from __future__ import annotations

import logging
import time

log = logging.getLogger("millstream.messaging")


def monotonic_ms() -> float:
    return time.monotonic() * 1000
