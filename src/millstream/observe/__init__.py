"""What is seen of a service, a pipeline, a server: metrics, health, readiness, and examinations for operators.

In: facts, through the observer protocol in ``model``. Out: metrics, and answers over HTTP where a port was asked for.
Nothing here changes what it looks at, and no text of an error becomes a label.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millstream.observe.service import ServiceMonitor as ServiceMonitor
    from millstream.observe.service_metrics import ServiceMetrics as ServiceMetrics
    from millstream.observe.stream_metrics import StreamSurveyor as StreamSurveyor

_HOMES = {"ServiceMetrics": "service_metrics", "ServiceMonitor": "service", "StreamSurveyor": "stream_metrics"}
"""Entered when asked for: an examination on the command line needs no HTTP server."""

__all__ = [*_HOMES]  # noqa: PLE0604  # the keys are strings, which the rule does not see


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'millstream.observe' has no attribute {name!r}")
    return getattr(import_module(f"millstream.observe.{home}"), name)
