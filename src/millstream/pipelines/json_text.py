"""JSON as text that keeps what it says: every digit of a number, the order of members, bytes that nobody changed.

Spark's own parsers make doubles of numbers, take single quotes, and stop where a value ends. This is stricter: a
document is one whole JSON value of RFC 8259, or it is refused. Numbers stay text (``Number``) until they are compared.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal, InvalidOperation
from json.decoder import scanstring  # type: ignore[attr-defined]  # typeshed does not list it
from json.encoder import encode_basestring, encode_basestring_ascii
from typing import Any, Final, NamedTuple

NO_OBJECT = "this is no JSON object"
_S = r"[ \t\n\r]*"
_OPENING = re.compile(rf"{_S}{{{_S}(\}}?){_S}").match
_COLON = re.compile(rf"{_S}:{_S}").match
_COMMA = re.compile(rf"{_S}([,}}]){_S}").match


class JsonError(ValueError):
    """The text is not one whole JSON value."""


class Number(str):
    """A JSON number as it was written: ``1.10`` stays ``1.10``, and a hundred digits stay a hundred digits."""

    __slots__ = ()

    def exact(self) -> Decimal | None:
        """Its value; None where its exponent is beyond anything that could be compared."""
        try:
            return Decimal(self)
        except InvalidOperation:
            return None


def _no_constant(word: str) -> Any:
    raise JsonError(f"{word} is no JSON value")


_DECODER: Final = json.JSONDecoder(parse_float=Number, parse_int=Number, parse_constant=_no_constant)
_SCAN: Final = _DECODER.scan_once  # type: ignore[attr-defined]  # typeshed does not list it


def parse(text: str) -> Any:
    """The value: dict, list, str, Number, bool or None. Of a name that stands twice in an object, the last counts."""
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise JsonError(_why(error)) from error


class JsonMember(NamedTuple):
    """A member's value, and the very text that stands for it."""

    text: str
    value: Any


def members(text: str) -> dict[str, JsonMember]:
    """The members of one whole JSON object. Of a name that stands twice, the last counts."""
    found: dict[str, JsonMember] = {}
    opened = _OPENING(text)
    if opened is None:
        raise JsonError(NO_OBJECT)
    at, end = opened.end(), opened[1]
    try:
        while end != "}":
            if text[at : at + 1] != '"':
                raise JsonError(f"a member's name is missing at character {at}")
            name, at = scanstring(text, at + 1)
            colon = _COLON(text, at)
            if colon is None:
                raise JsonError(f"a colon is missing at character {at}")
            start = colon.end()
            value, at = _SCAN(text, start)
            found[name] = JsonMember(text[start:at], value)
            comma = _COMMA(text, at)
            if comma is None:
                raise JsonError(f"a comma is missing at character {at}")
            at, end = comma.end(), comma[1]
    except StopIteration as error:
        raise JsonError(f"a value is missing at character {error.value}") from error
    except (ValueError, RecursionError) as error:
        raise JsonError(_why(error)) from error
    if at != len(text):
        raise JsonError("something stands behind the object's end")
    return found


def is_object(text: str | None) -> bool:
    """Whether the whole text is one JSON object."""
    try:
        return text is not None and isinstance(parse(text), dict)
    except JsonError:
        return False


def write(value: Any) -> str:
    """The value without spaces. Numbers as they were written."""
    text = _written(value, encode_basestring)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair: only its escape can travel
        return _written(value, encode_basestring_ascii)
    return text


def shown(value: Any) -> str:
    """The value as a template writes it: text without quotes, everything else as JSON."""
    if not isinstance(value, str):
        return write(value)
    return str(value) if value.isascii() else value.encode(errors="replace").decode()


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal: numbers by their exact value, and nothing equals what is of another type."""
    if isinstance(one, Number) and isinstance(other, Number):
        left, right = one.exact(), other.exact()
        return one == other if left is None or right is None else left == right
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    return bool(one == other)


def canonical(value: Any) -> str:
    """The value as JSON, one text for all that are ``same``: ``1`` for 1.0 and 10e-1, ``"1"`` for the text."""
    if isinstance(value, Number):
        return _canonical_number(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{write(name)}:{canonical(value[name])}" for name in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(canonical, value)) + "]"
    return write(value)


def _canonical_number(number: Number) -> str:
    exact = number.exact()
    if exact is None:
        return str(number)
    sign, digits, exponent = exact.as_tuple()
    assert isinstance(exponent, int), "JSON has no infinities"
    whole = "".join(map(str, digits)).lstrip("0")
    stripped = whole.rstrip("0")
    if not stripped:
        return "0"
    exponent += len(whole) - len(stripped)
    minus = "-" if sign else ""
    if 0 <= exponent <= 40:
        return f"{minus}{stripped}{'0' * exponent}"
    if -40 <= exponent < 0:
        padded = stripped.rjust(1 - exponent, "0")
        return f"{minus}{padded[:exponent]}.{padded[exponent:]}"
    return f"{minus}{stripped}e{exponent}"


def _written(value: Any, quote: Any) -> str:
    if isinstance(value, Number):
        return str(value)
    if isinstance(value, str):
        return str(quote(value))
    if isinstance(value, dict):
        return "{" + ",".join(f"{quote(name)}:{_written(one, quote)}" for name, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_written(one, quote) for one in value) + "]"
    return "null" if value is None else "true" if value is True else "false"


def _why(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return str(error) or "this is no JSON"
