"""The pages, one file each: parameters of an address in, what a template shows out. They ask the survey and the broker,
and act through the same functions as the command line; nothing is decided here that those do not decide."""

from millstream.dashboard.pages import assignments, dead_letters, overview, pipelines, stream

PAGES = (*overview.PAGES, *stream.PAGES, *dead_letters.PAGES, *pipelines.PAGES, *assignments.PAGES)
ACTIONS = (*dead_letters.ACTIONS, *pipelines.ACTIONS, *assignments.ACTIONS)
"""Each has an address for the question (GET) and the same for the answer (POST)."""

__all__ = ["ACTIONS", "PAGES"]
