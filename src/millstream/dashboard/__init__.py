"""Web dashboard: shows streams, dead letters, pipelines and assignments, and carries out confirmed actions.

Numbers come from ``observe/`` and the broker. Actions call the same functions as the command line. The dashboard adds
no counting and no decisions of its own. Names and payloads are untrusted: every displayed value is escaped by
``render``.
"""

from millstream.dashboard.app import Dashboard

__all__ = ["Dashboard"]
