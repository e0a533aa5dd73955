"""Signals that arrive while the command line is imported, and before a command handles signals itself.

Python raises KeyboardInterrupt in the middle of an import: it prints a traceback, and if the import calls a destructor
at that moment, Python drops the exception and the signal is lost. As process 1 of a container, a process does not even
end at SIGTERM, because the kernel ignores default actions there.
"""

from __future__ import annotations

import os
import signal


def install() -> None:
    """From now on SIGINT, and SIGTERM for process 1, end the process at once with exit code 128 + its number."""
    signal.signal(signal.SIGINT, _end)
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, _end)


def remove() -> None:
    """Restores Python's handlers, if the present ones are those of ``install``."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        if signal.getsignal(number) is _end:
            signal.signal(number, handler)


def _end(number: int, frame: object) -> None:
    os._exit(128 + number)
