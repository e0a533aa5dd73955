"""Running what people wrote: routers, buses and assigned subscribers, in many processes or beside a web
application.

In: a target such as ``shop.app:router``. Out: processes that live until they are told to end, and say what they leave.
Never a decision about messages: what runs here does that itself.
"""

from millstream.runner.supervisor import Supervisor, SupervisorSettings
from millstream.runner.worker import (
    REFUSED,
    RunTarget,
    TargetRefused,
    handlers_of,
    lifespan,
    load_target,
    log_to_stderr,
)

__all__ = [
    "REFUSED",
    "RunTarget",
    "Supervisor",
    "SupervisorSettings",
    "TargetRefused",
    "handlers_of",
    "lifespan",
    "load_target",
    "log_to_stderr",
]
