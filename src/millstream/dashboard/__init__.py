"""A page to look at and to steer by, in a browser. In: requests. Out: HTML, and events while a page is open.

Numbers come from ``observe/`` and the broker, actions go through the functions of the command line: nothing is counted
or decided here a second time. Names and payloads are hostile: what is shown passes ``render``, and nothing else does.
"""

from millstream.dashboard.app import Dashboard

__all__ = ["Dashboard"]
