"""Python's cyclic collector, kept from searching what cannot be garbage yet."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """For whoever makes thousands of small objects, none of them garbage: searching them again and again costs more
    than making them. For moments, or in processes that are ours: it rests for everybody."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
