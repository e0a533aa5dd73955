"""Batches given to several targets at once: each has a thread, so that a slow one does not add its time to the others'.

A target that fails is given nothing more; the others get all of their rows first, and only then is the error raised.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Sequence
from typing import Final

import pyarrow as pa

from millstream.spark.target import Target

_AHEAD: Final = 2
"""Batches that may wait for a target: it bounds memory, and keeps a quick target from waiting for the rows."""


def give(batches: Iterable[pa.RecordBatch], targets: Sequence[Target]) -> None:
    """Returns when every target has every batch; raises the error of the first that failed, in their order."""
    if len(targets) == 1:
        for batch in batches:
            targets[0].take(batch)
        return
    hands = [_Hand(target) for target in targets]
    try:
        for batch in batches:
            for hand in hands:
                hand.give(batch)
    finally:
        for hand in hands:
            hand.give(None)
        for hand in hands:
            hand.join()
    for hand in hands:
        if hand.error is not None:
            hand.error.add_note(f"while writing to sink {hand.target.options.sink_id!r}")
            raise hand.error


class _Hand(threading.Thread):
    def __init__(self, target: Target) -> None:
        super().__init__(name=f"millstream-{target.options.sink_id}", daemon=True)
        self.target = target
        self.error: BaseException | None = None
        self._waiting: queue.Queue[pa.RecordBatch | None] = queue.Queue(_AHEAD)
        self.start()

    def give(self, batch: pa.RecordBatch | None) -> None:
        """None is the end."""
        self._waiting.put(batch)

    def run(self) -> None:
        while (batch := self._waiting.get()) is not None:
            if self.error is None:
                try:
                    self.target.take(batch)
                except BaseException as error:  # raised again in the task's own thread
                    self.error = error
