"""What people type. Each command parses, calls a room, and shows the result; decisions live in the rooms.

A command's module is imported when it is chosen, so that ``millstream --help`` stays quick.
"""

from millstream.cli.main import main

__all__ = ["main"]
