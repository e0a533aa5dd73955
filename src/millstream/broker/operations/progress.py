"""A reader that keeps its own place (Spark) shows it as a consumer group's position."""

from __future__ import annotations

from millstream.broker.context import Context
from millstream.broker.operations.arguments import Id, Name, counter_word, id_word, name_word
from millstream.broker.steps.script import run_script, script
from millstream.wire.commands import Conversation


def advance_group(
    context: Context, stream: Name, group: Name, position: Id, *, entries_read: int | None = None
) -> Conversation[bool]:
    """Moves the group to ``position`` unless it is there or beyond; makes it where it is missing.

    One atomic step, forward only, safe to repeat. With ``entries_read`` (how many entries were ever added up to the
    position) Redis can tell the group's lag; without it the lag is null. False where nothing was changed, also because
    there is no such stream.
    """
    key = name_word(stream, "stream")
    counted = b"" if entries_read is None else counter_word(entries_read, "entries_read")
    argv = (name_word(group, "group"), id_word(position, "position"), counted)
    moved: int = yield from run_script(script("advance_group"), [key], argv, repeatable=True)
    return moved == 1
