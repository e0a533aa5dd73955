"""Append that skips entries whose event id was appended recently, for rows without a stable order."""

from millstream.broker.scripts.append_unique.call import DAY_MS, append_unique

__all__ = ["DAY_MS", "append_unique"]
