"""What an examination finds: a fact, how bad it is, and what to do about it."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Severity(StrEnum):
    ok = "ok"
    note = "note"
    warning = "warning"
    problem = "problem"


class Finding(NamedTuple):
    level: Severity
    what: str
    found: str
    remedy: str = ""
