"""What is seen of a service, a pipeline, a server: metrics, health, readiness, and examinations for operators.

In: facts, through the observer protocol in ``model``. Out: metrics, and answers over HTTP where a port was asked for.
Nothing here changes what it looks at, and no text of an error becomes a label.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millstream.observe.diagnose import Finding as Finding
    from millstream.observe.diagnose import Severity as Severity
    from millstream.observe.diagnose import examine_binlog as examine_binlog
    from millstream.observe.diagnose import examine_machine as examine_machine
    from millstream.observe.diagnose import examine_server as examine_server
    from millstream.observe.diagnose import examine_slot as examine_slot
    from millstream.observe.format import age as age
    from millstream.observe.format import count_of as count_of
    from millstream.observe.format import duration as duration
    from millstream.observe.format import entries as entries
    from millstream.observe.format import harmless as harmless
    from millstream.observe.format import made_at as made_at
    from millstream.observe.format import moment as moment
    from millstream.observe.format import named as named
    from millstream.observe.format import printable as printable
    from millstream.observe.format import size as size
    from millstream.observe.http import HttpServer as HttpServer
    from millstream.observe.http import allowed as allowed
    from millstream.observe.http import application as application
    from millstream.observe.http import foreign as foreign
    from millstream.observe.http import host_name as host_name
    from millstream.observe.http import is_loopback as is_loopback
    from millstream.observe.http import refuse_strangers as refuse_strangers
    from millstream.observe.metrics import Exposition as Exposition
    from millstream.observe.metrics import StreamSurveyor as StreamSurveyor
    from millstream.observe.metrics import together as together
    from millstream.observe.pipeline_client import PipelineClient as PipelineClient
    from millstream.observe.pipeline_client import PipelineRefused as PipelineRefused
    from millstream.observe.pipeline_client import PipelinesUnreachable as PipelinesUnreachable
    from millstream.observe.pipelines import PipelineMetrics as PipelineMetrics
    from millstream.observe.pipelines import PipelineRoutes as PipelineRoutes
    from millstream.observe.service import ServiceMonitor as ServiceMonitor
    from millstream.observe.service_metrics import ServiceMetrics as ServiceMetrics
    from millstream.observe.streams import Look as Look
    from millstream.observe.streams import Row as Row
    from millstream.observe.streams import examine_stream as examine_stream
    from millstream.observe.streams import holding_group as holding_group
    from millstream.observe.streams import look as look
    from millstream.observe.streams import rows as rows

_HOMES = {
    "Finding": "diagnose",
    "Severity": "diagnose",
    "examine_binlog": "diagnose",
    "examine_machine": "diagnose",
    "examine_slot": "diagnose",
    "examine_stream": "streams",
    "examine_server": "diagnose",
    "age": "format",
    "count_of": "format",
    "duration": "format",
    "entries": "format",
    "harmless": "format",
    "named": "format",
    "printable": "format",
    "size": "format",
    "made_at": "format",
    "moment": "format",
    "holding_group": "streams",
    "HttpServer": "http",
    "allowed": "http",
    "application": "http",
    "foreign": "http",
    "host_name": "http",
    "is_loopback": "http",
    "refuse_strangers": "http",
    "Exposition": "metrics",
    "together": "metrics",
    "PipelineClient": "pipeline_client",
    "PipelineRefused": "pipeline_client",
    "PipelinesUnreachable": "pipeline_client",
    "PipelineMetrics": "pipelines",
    "PipelineRoutes": "pipelines",
    "ServiceMonitor": "service",
    "ServiceMetrics": "service_metrics",
    "StreamSurveyor": "metrics",
    "Look": "streams",
    "Row": "streams",
    "look": "streams",
    "rows": "streams",
}
"""Entered when asked for: an examination on the command line needs no HTTP server."""

__all__ = [*_HOMES]  # noqa: PLE0604  # the keys are strings, which the rule does not see


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'millstream.observe' has no attribute {name!r}")
    return getattr(import_module(f"millstream.observe.{home}"), name)
