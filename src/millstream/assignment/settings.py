"""How a member behaves: how much it takes, how long it may be silent, how often it looks."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Literal

from millstream.assignment.announcement import GO_LOCK_SEPARATOR
from millstream.errors import InvalidArgument


def default_member() -> str:
    """The name under which this process is known: its pod's, else its host and process."""
    pod = os.environ.get("POD_NAME") or os.environ.get("POD_IP") or f"{socket.gethostname()}-{os.getpid()}"
    return f"redis-consumer-{pod}"


@dataclass(frozen=True, slots=True)
class Settings:
    """``takeover="automatic"`` claims what a dead member left; ``"notify"`` sends StreamExpired and leaves it to the
    application; every living member is told, and again after each lease until somebody has claimed it. ``go_locks``
    keeps the Go client's lock keys in step, for fleets of both; ``go_lock_separators`` are what stands between stream
    and id in such a key: with members of the Go client's earlier releases, ``("<MUTEX_KEY_SEP>", ":")``.
    """

    capacity: int = 10_000
    lease_ms: int = 5_000
    renew_interval_ms: int = 1_500
    sweep_interval_ms: int = 250
    takeover: Literal["automatic", "notify"] = "automatic"
    go_locks: bool = True
    go_lock_separators: tuple[str, ...] = (GO_LOCK_SEPARATOR,)
    queue_size: int = 1_000

    def __post_init__(self) -> None:
        for name in ("capacity", "lease_ms", "renew_interval_ms", "sweep_interval_ms", "queue_size"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise InvalidArgument(name, value, "a whole number of 1 or more")
        if self.lease_ms < 2 * self.renew_interval_ms:
            raise InvalidArgument(
                "lease_ms",
                self.lease_ms,
                f"at least twice renew_interval_ms ({self.renew_interval_ms}), so that one lost renewal loses nothing",
            )
        if self.takeover not in ("automatic", "notify"):
            raise InvalidArgument("takeover", self.takeover, "automatic or notify")
        separators = self.go_lock_separators
        if (
            not isinstance(separators, tuple)
            or not separators
            or not all(isinstance(one, str) and one for one in separators)
        ):
            raise InvalidArgument(
                "go_lock_separators", separators, f"a tuple of texts, such as ({GO_LOCK_SEPARATOR!r},)"
            )
