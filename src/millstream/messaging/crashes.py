"""What left a handler, judged: a failure of its one message, or something that is meant for more than that. Pure."""

from __future__ import annotations

import asyncio
from typing import Any

from millstream.messaging.errors import HandlerCancelled, HandlerCrashed


def failure_of(error: BaseException, task: asyncio.Task[Any] | None) -> Exception | None:
    """What the message has failed with; None where the error must go on its way. ``task`` is the one that handles.

    Whatever a handler raises is a failure of its message, ``SystemExit`` and other strangers too: ``sys.exit()`` deep
    in a library must not take along all that is in flight beside it. Three things go on their way: Ctrl-C, the
    cancellation of the task itself, and a coroutine that is thrown away with its loop.
    """
    if isinstance(error, Exception):
        return error
    if isinstance(error, KeyboardInterrupt):
        return None
    if isinstance(error, asyncio.CancelledError):
        # Without a cancelled task, something that the handler waited for was cancelled, and not the handler.
        return None if task is not None and task.cancelling() else HandlerCancelled(error)
    if isinstance(error, GeneratorExit) and not _runs(task):
        return None
    return HandlerCrashed(error)


def _runs(task: asyncio.Task[Any] | None) -> bool:
    try:
        return asyncio.current_task() is task
    except RuntimeError:  # no loop runs here any more
        return False
