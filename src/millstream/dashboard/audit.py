"""What was done from a page: who, what, when, and how it ended, in a bounded stream of the broker itself.

It is written before anything is done: what cannot be noted is not done.
"""

from __future__ import annotations

from typing import NamedTuple

from millstream.broker import Broker
from millstream.model import Entry, EntryId, TrimPolicy

AUDIT_STREAM = "millstream.audit"
MOST = 10_000
_TEXT = 2_000


class Note(NamedTuple):
    who: str
    what: str
    outcome: str
    fine: bool

    @classmethod
    def read(cls, entry: Entry) -> Note:
        def text(name: bytes) -> str:
            return entry.fields.get(name, b"").decode("utf-8", "surrogateescape")

        return cls(text(b"who"), text(b"what"), text(b"outcome"), text(b"state") == "done")


class Audit:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def begin(self, who: str, what: str) -> EntryId:
        return await self._add({"who": who, "what": what, "state": "begun"})

    async def end(self, begun: EntryId, who: str, what: str, outcome: str, *, fine: bool) -> EntryId:
        state = "done" if fine else "failed"
        return await self._add({"who": who, "what": what, "state": state, "outcome": outcome, "begun": str(begun)})

    async def note(self, id: EntryId) -> tuple[EntryId, Note] | None:
        found = await self._broker.xrange(AUDIT_STREAM, id, id)
        return (found[0].id, Note.read(found[0])) if found else None

    async def _add(self, fields: dict[str, str]) -> EntryId:
        known = {name: value[:_TEXT] for name, value in fields.items()}
        return await self._broker.xadd(AUDIT_STREAM, known, trim=TrimPolicy(max_len=MOST, approximate=True))
