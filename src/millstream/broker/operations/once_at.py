"""append_once for rows that bring their ids: the ids of a step are checked before any of its rows is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millstream.broker.context import Context
from millstream.broker.once import UNKNOWN, Digest
from millstream.broker.operations.durability import run_script_durably
from millstream.broker.operations.once import Once
from millstream.broker.steps.script import script
from millstream.errors import IdTooSmall
from millstream.wire.commands import Conversation
from millstream.wire.names import to_name


class OnceAt(Once):
    """A writer whose rows are ``[id, name, value, ...]``. The id is part of the row, and of the digest.

    Raises IdTooSmall, having written nothing of the step, where an id is not greater than the one before it.
    """

    def _step(self, context: Context, rows: Sequence[list[bytes]]) -> Conversation[tuple[list[Any], Digest | None]]:
        ahead = self.digest.copy() if self.digest is not None else None
        if ahead is not None:
            ahead.add(rows)
        argv = [
            *(self._partition, self._version, b"%d" % self.position),
            self.digest.word() if self.digest is not None else UNKNOWN,
            *(ahead.word() if ahead is not None else UNKNOWN, self._ttl),
        ]
        for row in rows:
            argv.append(b"%d" % (len(row) - 1))
            argv += row
        reply: list[Any] = yield from run_script_durably(
            context, script("append_once_at"), (self._stream, self._markers), argv, self._durability, repeatable=True
        )
        return reply, ahead

    def _refused(self, reply: list[Any]) -> None:
        if reply[0] == b"ID":
            raise IdTooSmall(
                f"id {reply[1].decode()} for stream {to_name(self._stream)!r} is not greater than {reply[2].decode()}, "
                "and nothing of this step was written. Bring a stream's rows in the order of their ids, by one writer."
            )
        super()._refused(reply)
