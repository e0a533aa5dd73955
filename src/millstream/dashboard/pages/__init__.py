"""The pages, one file each: they turn the parameters of a URL into the values of a template.

They read the stream stats and the broker, and act through the same functions as the command line.
"""

from millstream.dashboard.pages import assignments, dead_letters, overview, pipelines, stream

PAGES = (*overview.PAGES, *stream.PAGES, *dead_letters.PAGES, *pipelines.PAGES, *assignments.PAGES)
ACTIONS = (*dead_letters.ACTIONS, *pipelines.ACTIONS, *assignments.ACTIONS)
"""Each has one path: GET shows the confirmation page, POST executes the action."""

__all__ = ["ACTIONS", "PAGES"]
