"""The one thread that reads a log ahead into the spool: what the sessions of all databases share.

It stays open over all batches, stops reading while the spool is full, and connects again after a fault that may pass.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from random import random

from millstream.cdc.errors import SourceUnreachable
from millstream.cdc.spool import LogSpool
from millstream.model import Backoff

log = logging.getLogger("millstream.cdc")

TICK_S = 0.2
_RECONNECT = Backoff(initial_ms=200, max_ms=5000)


class ChangeSession(threading.Thread, ABC):
    """``shown`` is the database's address, without secrets.

    Whatever ends it for good is in ``spool.error``; a fault that may pass is in ``trouble`` until it has passed.
    """

    def __init__(self, spool: LogSpool, shown: str) -> None:
        super().__init__(name="millstream-cdc", daemon=True)
        self._spool = spool
        self._shown = shown
        self._ending = threading.Event()
        self._last_contact = time.monotonic()
        self.trouble: str | None = None

    @abstractmethod
    def acknowledge(self, position: int) -> None:
        """Everything up to here is finished, and may be forgotten by the server."""

    @abstractmethod
    def _stream(self) -> None:
        """Connects, calls ``_connected``, and spools until the session is to end. Raises SourceUnreachable or OSError
        for what may pass; everything else ends the session for good."""

    def stop(self) -> None:
        """Returns when the thread has ended. Idempotent."""
        self._ending.set()
        if self.is_alive():
            self.join(30)

    def run(self) -> None:
        attempt = 0
        while not self._ending.is_set():
            try:
                self._stream()
            except (SourceUnreachable, OSError) as error:
                attempt = 1 if self.trouble is None else attempt + 1
                if self.trouble is None:
                    log.warning("the log of %s is interrupted: %s", self._shown, error)
                self.trouble = str(error)
                self._ending.wait(_RECONNECT.delay_ms(attempt, random()) / 1000)  # noqa: S311  # jitter
            except BaseException as error:
                with self._spool.lock:
                    self._spool.error = error
                    self._spool.lock.notify_all()
                return

    def _connected(self) -> None:
        self._heard()
        if self.trouble is not None:
            log.warning("the log of %s goes on", self._shown)
            self.trouble = None

    def _heard(self) -> None:
        self._last_contact = time.monotonic()

    def _must_have_heard(self, within_s: float) -> None:
        if time.monotonic() - self._last_contact > within_s:
            raise SourceUnreachable(f"{self._shown} has been silent for too long. It is tried again.")

    def _wait_for_room(self) -> bool:
        """Between two transactions: whether the spool was full. What the server has to send stays with it."""
        with self._spool.lock:
            full = self._spool.full()
            if full:
                self._spool.lock.wait(TICK_S)
        if full:
            self._heard()
        return full
