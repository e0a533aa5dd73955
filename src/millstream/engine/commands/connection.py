"""What a connection says about itself: PING, ECHO, SELECT, AUTH, HELLO, RESET, QUIT."""

from __future__ import annotations

from collections.abc import Sequence

from millstream.engine.registry import Flag, command
from millstream.engine.session import Session
from millstream.wire.replies import PONG, Reply


@command("PING", arity=-1, flags=Flag.FAST | Flag.WHILE_SUBSCRIBED)
def ping(session: Session, args: Sequence[bytes]) -> Reply:
    return PONG
