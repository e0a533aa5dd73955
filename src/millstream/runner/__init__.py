"""Running what people wrote: routers, buses and assigned subscribers, in many processes or beside a web
application.

In: a target such as ``shop.app:router``. Out: processes that live until they are told to end, and say what they leave.
Never a decision about messages: what runs here does that itself.
"""

from millstream.runner.lifespan import lifespan
from millstream.runner.supervisor import Supervisor, SupervisorSettings
from millstream.runner.target import RunTarget, TargetRefused, load_target

__all__ = ["RunTarget", "Supervisor", "SupervisorSettings", "TargetRefused", "lifespan", "load_target"]
