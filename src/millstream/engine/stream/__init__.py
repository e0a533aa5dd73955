"""The data structures of the stream commands: compact nodes, ordered pending lists, and Redis's counters."""

from millstream.engine.stream.group import UNKNOWN_READS, Consumer, Group
from millstream.engine.stream.stream import Stream

__all__ = ["UNKNOWN_READS", "Consumer", "Group", "Stream"]
