"""What INFO and CONFIG know only because there is a server."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from millstream.engine.hooks import Hooks
    from millstream.server.server import Server


def add_to_info(server: Server, hooks: Hooks) -> None:
    began = time.monotonic()
    run_id = secrets.token_hex(20)

    def about_server() -> Mapping[str, object]:
        uptime = int(time.monotonic() - began)
        return {
            "process_id": os.getpid(),
            "run_id": run_id,
            "tcp_port": server.port,
            "uptime_in_seconds": uptime,
            "uptime_in_days": uptime // 86400,
        }

    def about_clients() -> Mapping[str, object]:
        return {"maxclients": server.service.limits.clients}

    def about_stats() -> Mapping[str, object]:
        return {
            "total_net_input_bytes": server.service.input_bytes,
            "total_net_output_bytes": server.service.output_bytes,
        }

    hooks.server, hooks.clients, hooks.stats = about_server, about_clients, about_stats
