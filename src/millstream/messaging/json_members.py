"""The members of a JSON object as they are written: a number keeps its digits, a text keeps its escapes. Pure."""

from __future__ import annotations

import json
import re
from json.decoder import WHITESPACE, scanstring  # type: ignore[attr-defined]  # there, if not in the stubs


def json_members(text: str) -> dict[str, str]:
    """The text of each member of an object. Of several members with one name the last one counts.

    Raises ValueError where ``text`` is not one JSON object, and RecursionError where it is nested too deeply.
    """
    members: dict[str, str] = {}
    at = _after_space(text, _expect(text, _after_space(text, 0), "{"))
    if text[at : at + 1] == "}":
        return _ended(text, at + 1, members)
    while True:
        name, at = scanstring(text, _expect(text, at, '"'))
        at = _after_space(text, _expect(text, _after_space(text, at), ":"))
        _, end = _SCANNER.raw_decode(text, at)
        members[name] = text[at:end]
        at = _after_space(text, end)
        if text[at : at + 1] == "}":
            return _ended(text, at + 1, members)
        at = _after_space(text, _expect(text, at, ","))


def _ended(text: str, at: int, members: dict[str, str]) -> dict[str, str]:
    if _after_space(text, at) != len(text):
        raise ValueError(f"text follows the object at character {at}")
    return members


def _expect(text: str, at: int, character: str) -> int:
    """The position behind the character."""
    if text[at : at + 1] != character:
        raise ValueError(f"{character!r} is missing at character {at}")
    return at + 1


def _after_space(text: str, at: int) -> int:
    matched: re.Match[str] | None = WHITESPACE.match(text, at)
    assert matched is not None  # the pattern matches the empty text, too
    return matched.end()


_SCANNER = json.JSONDecoder(parse_int=str, parse_float=str)  # values are not used: reading numbers would only cost
