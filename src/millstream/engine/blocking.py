"""A command that waits, as a value. The queue of waiters decides who is served first: whoever came first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from millstream.wire.replies import NIL_ARRAY, Reply


class Block:
    """What a handler returns when it has nothing yet and the client allowed it to wait.

    ``serve(key)`` tries again for one key that was touched: a reply ends the wait, None goes on waiting.
    ``deadline_ms`` is on the engine's clock; None waits for ever.
    """

    __slots__ = ("deadline_ms", "keys", "serve", "timeout_reply")

    def __init__(
        self,
        keys: Sequence[bytes],
        deadline_ms: int | None,
        serve: Callable[[bytes], Reply | None],
        timeout_reply: Reply = NIL_ARRAY,
    ) -> None:
        self.keys = keys
        self.deadline_ms = deadline_ms
        self.serve = serve
        self.timeout_reply = timeout_reply
