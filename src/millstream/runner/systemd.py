"""Notifications to systemd (``Type=notify``), sent as datagrams to NOTIFY_SOCKET."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping, MutableMapping
from typing import Final

log = logging.getLogger("millstream.run")

NOTIFY_VARIABLES: Final = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
"""They are meant for the supervisor. Worker processes do not inherit them."""


class SystemdNotifier:
    """Sends states to the socket that NOTIFY_SOCKET names. If it is not set, ``send`` does nothing.

    ``watchdog_interval_s`` is half of systemd's watchdog timeout, as its manual recommends; None if systemd does not
    watch this process.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._address = environment.get("NOTIFY_SOCKET") or None
        self.watchdog_interval_s = _watchdog_interval_s(environment) if self._address else None
        self._has_failed = False

    @property
    def is_enabled(self) -> bool:
        return self._address is not None

    def send(self, *states: str) -> None:
        """Such as ``send("READY=1", "STATUS=4 workers")``. Never raises: the service runs without systemd too."""
        if self._address is None:
            return
        address = f"\0{self._address[1:]}" if self._address.startswith("@") else self._address
        try:
            with socket.socket(
                socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
            ) as sender:
                sender.connect(address)
                sender.sendall("\n".join(states).encode())
        except (OSError, ValueError) as error:  # ValueError: a zero byte in a path
            if not self._has_failed:
                self._has_failed = True
                log.warning("cannot notify systemd at %s: %s", self._address, error)


def _watchdog_interval_s(environment: Mapping[str, str]) -> float | None:
    try:
        interval_us = int(environment.get("WATCHDOG_USEC", "0"))
        watched_pid = int(environment.get("WATCHDOG_PID") or os.getpid())
    except ValueError:
        return None
    return interval_us / 2e6 if interval_us > 0 and watched_pid == os.getpid() else None


def without_notify_variables(environment: MutableMapping[str, str]) -> dict[str, str]:
    """The environment for a child process: systemd accepts notifications only from the main process."""
    return {name: value for name, value in environment.items() if name not in NOTIFY_VARIABLES}
