"""Plants a fault of the table between a part and its server: in one phase, for a number of commands."""

from __future__ import annotations

import threading

from millstream.testing.answering import ANSWER_LOST, ProxyAnswer, Request, refusal
from support.fault_table import FaultRow, Follows, Phase

IN_ITS_COURSE = frozenset({b"MULTI", b"EXEC", b"DISCARD", b"ASKING", b"CLIENT", b"CLUSTER", b"INFO", b"CONFIG"})
"""Commands that belong to other commands, or that ask the server about itself."""
PASSES = (Follows.RETRIED, Follows.FOLLOWED)


class Planting:
    """Refuses commands in one phase, a number of times, after ``begun`` is set; only a part's own commands."""

    def __init__(self, fault: FaultRow, phase: Phase, port: int) -> None:
        self._fault = fault
        self._phase = phase
        text = fault.text.format(slot=105, place=f"127.0.0.1:{port}")
        self._answer = (
            refusal(text, after_s=0.02 if phase is Phase.BLOCKED else 0.0, cut=fault.name == "max clients")
            if text
            else ANSWER_LOST
        )
        self._left = 3 if fault.follows(phase) in PASSES else 1
        self._skip = 2 if phase is Phase.BATCH else 0
        self._lock = threading.Lock()
        self.begun = False
        self.refused = 0

    def __call__(self, request: Request) -> ProxyAnswer | None:
        with self._lock:
            if not self.begun or self._left <= 0 or not self._meant(request):
                return None
            if self._skip:
                self._skip -= 1
                return None
            self._left -= 1
            self.refused += 1
            return self._answer

    def _meant(self, request: Request) -> bool:
        if self._phase is Phase.CONNECTING:
            return request.opening and bool(request.args) == (self._fault.name != "max clients")
        if request.opening or not request.args:
            return False
        if self._phase is Phase.TRANSACTION:
            at_the_end = self._fault.name.startswith("EXECABORT") or not self._fault.text
            return request.in_transaction and (request.name == b"EXEC") == at_the_end
        if request.in_transaction or request.name in IN_ITS_COURSE:
            return False
        if self._phase is Phase.BLOCKED:
            return request.blocks
        return request.name == b"EVALSHA" if self._fault.name == "NOSCRIPT" else not request.blocks
