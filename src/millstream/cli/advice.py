"""An error as the command line says it: what to type instead of Python, and nothing that a terminal obeys."""

from __future__ import annotations

from typing import Final

from millstream.cli.show import harmless
from millstream.errors import MillstreamError

_TYPE_INSTEAD: Final = (
    (
        "Create it with create_group(stream, group, start=...).",
        "`millstream groups ls` lists groups; `millstream groups create STREAM GROUP --start 0` makes one.",
    ),
    ("Add an entry or create a group first.", "`millstream streams ls` lists those that exist."),
    ("Use it as it is, or pass exist_ok=True.", "Use it as it is."),
    ("Pass to=<other consumer> to hand them over first.", "Pass --to CONSUMER to hand them over first."),
    ("Put the password into the URL or into MILLSTREAM_URL.", "Put the password into --url or into MILLSTREAM_URL."),
)


def sentence(error: MillstreamError) -> str:
    text = str(error)
    for python, typed in _TYPE_INSTEAD:
        text = text.replace(python, typed)
    return harmless(text)
