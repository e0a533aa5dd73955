"""SIGINT and SIGTERM as a request to stop, for as long as something runs; then everything is as it was before."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def signals_to(stop: Callable[[], None], *, enabled: bool = True) -> Iterator[None]:
    """Calls ``stop`` on the loop. Does nothing outside of the main thread, where Python delivers no signals."""
    if not enabled or threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
            # remove_signal_handler sets the default; what was there before may have been somebody's own.
            if (handler := before[number]) is not None:
                signal.signal(number, handler)
