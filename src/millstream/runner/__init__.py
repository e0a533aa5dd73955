"""Runs routers, buses and assigned subscribers: in worker processes, or inside a web application.

Input is a target such as ``shop.app:router``. The supervisor starts worker processes, restarts those that die and ends
them after a signal. It decides nothing about messages: the routers do.
"""

from millstream.runner.supervisor import Supervisor, SupervisorSettings
from millstream.runner.worker import TargetRefused, lifespan, load_target

__all__ = [
    "Supervisor",
    "SupervisorSettings",
    "TargetRefused",
    "lifespan",
    "load_target",
]
