"""Dropping what nobody needs any more."""

from millstream.broker.steps.retention.call import (
    GroupHold,
    Retained,
    keep_short,
    losses,
    retain,
    stream_bytes,
    trim_safely,
)

__all__ = ["GroupHold", "Retained", "keep_short", "losses", "retain", "stream_bytes", "trim_safely"]
