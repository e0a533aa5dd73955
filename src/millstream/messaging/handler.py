"""What a handler puts out, in one shape."""

from __future__ import annotations

from collections.abc import Sequence

from millstream.messaging.message import Handler, Message, Middleware

__all__ = ["Handler", "Middleware", "Output", "as_messages"]

Output = Message | Sequence[Message] | None
"""What a handler may return."""


def as_messages(output: Output) -> Sequence[Message]:
    """Nothing, one message or several, as a sequence."""
    if output is None:
        return ()
    return (output,) if isinstance(output, Message) else output
