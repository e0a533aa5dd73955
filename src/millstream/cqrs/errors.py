"""What can be wrong with a handler, a command or an event; each error names the place in the user's program."""

from __future__ import annotations

from millstream.errors import MillstreamError


class DuplicateHandler(MillstreamError):
    """Two handlers for one command, or two event handlers that would share one group. ``places`` names both."""

    places: tuple[str, str]

    def __init__(self, what: str, first: str, second: str, advice: str) -> None:
        super().__init__(f"{what} has two handlers, {first} and {second}. {advice}", what=what, places=(first, second))
