"""JSON that keeps its exact text: every digit of a number, the order of members, unchanged bytes.

Spark's own parsers convert numbers to doubles, accept single quotes, and ignore text after a value. This one is
stricter: a document is one complete JSON value of RFC 8259, or it is refused. Numbers stay text (``Number``) until they
are compared.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal, InvalidOperation
from json.decoder import scanstring  # type: ignore[attr-defined]  # typeshed does not list it
from json.encoder import encode_basestring, encode_basestring_ascii
from typing import Any, Final, NamedTuple

NO_OBJECT = "this is no JSON object"
MAX_DEPTH = 200
"""Functions here recurse with two frames per level: deeper documents would exceed Python's recursion limit."""
_S = r"[ \t\n\r]*"
_OPENING = re.compile(rf"{_S}{{{_S}(\}}?){_S}").match
_COLON = re.compile(rf"{_S}:{_S}").match
_COMMA = re.compile(rf"{_S}([,}}]){_S}").match


class JsonError(ValueError):
    """The text is not one complete JSON value."""


class Number(str):
    """A JSON number with its exact text: ``1.10`` stays ``1.10``, and a number of a hundred digits keeps them."""

    __slots__ = ()

    def exact(self) -> Decimal | None:
        """Its exact value; None if its exponent is too large to compare."""
        try:
            return Decimal(self)
        except InvalidOperation:
            return None


def _no_constant(name: str) -> Any:
    raise JsonError(f"{name} is no JSON value")


_DECODER: Final = json.JSONDecoder(parse_float=Number, parse_int=Number, parse_constant=_no_constant)
_SCAN: Final = _DECODER.scan_once  # type: ignore[attr-defined]  # typeshed does not list it


def parse(text: str) -> Any:
    """The value: dict, list, str, Number, bool or None. Of duplicate names in an object, the last counts."""
    try:
        value = _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise JsonError(_why(error)) from error
    _refuse_deep(text, value)
    return value


def has_duplicate_members(text: str) -> bool:
    """Whether any object in the JSON text has two members with one name: ``parse`` keeps only the last one."""
    has_duplicate = False

    def pairs(members_of_object: list[tuple[str, Any]]) -> None:
        nonlocal has_duplicate
        has_duplicate = has_duplicate or len({name for name, _ in members_of_object}) < len(members_of_object)

    json.loads(text, object_pairs_hook=pairs, parse_int=str, parse_float=str)
    return has_duplicate


def _refuse_deep(text: str, value: Any) -> None:
    if text.count("{") + text.count("[") <= MAX_DEPTH:
        return
    level, depth = [value], 0
    while level := [v for v in level if isinstance(v, dict | list)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise JsonError("it is nested too deeply")
        level = [inner for v in level for inner in (v.values() if isinstance(v, dict) else v)]


class JsonMember(NamedTuple):
    """A member's value, and its exact text."""

    text: str
    value: Any


def members(text: str) -> dict[str, JsonMember]:
    """The members of one complete JSON object. Of duplicate names, the last counts."""
    members_by_name: dict[str, JsonMember] = {}
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
            members_by_name[name] = JsonMember(text[start:at], value)
            comma = _COMMA(text, at)
            if comma is None:
                raise JsonError(f"a comma is missing at character {at}")
            at, end = comma.end(), comma[1]
    except StopIteration as error:
        raise JsonError(f"a value is missing at character {error.value}") from error
    except (ValueError, RecursionError) as error:
        raise JsonError(_why(error)) from error
    if at != len(text):
        raise JsonError("there is more text after the end of the object")
    _refuse_deep(text, {name: member.value for name, member in members_by_name.items()})
    return members_by_name


def is_object(text: str | None) -> bool:
    """Whether the text is exactly one JSON object."""
    try:
        return text is not None and isinstance(parse(text), dict)
    except JsonError:
        return False


def write(value: Any) -> str:
    """The value as JSON without spaces. Numbers keep their text."""
    text = _written(value, encode_basestring)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair can be written only as an escape
        return _written(value, encode_basestring_ascii)
    return text


def template_text(value: Any) -> str:
    """The value as a template writes it: text without quotes, everything else as JSON."""
    if not isinstance(value, str):
        return write(value)
    return str(value) if value.isascii() else value.encode(errors="backslashreplace").decode()


def is_encodable(text: str) -> bool:
    """False for text with half of a surrogate pair, which JSON can represent and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal: numbers by their exact value; values of different types are never equal."""
    if isinstance(a, Number) and isinstance(b, Number):
        exact_a, exact_b = a.exact(), b.exact()
        return a == b if exact_a is None or exact_b is None else exact_a == exact_b
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(value, b[name]) for name, value in a.items())
    if isinstance(a, list):
        return len(a) == len(b) and all(same(*pair) for pair in zip(a, b, strict=True))
    return bool(a == b)


def canonical(value: Any) -> str:
    """The value as canonical JSON, equal for all that are ``same``: ``1`` for 1.0 and 10e-1, ``"1"`` for text."""
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
        return "{" + ",".join(f"{quote(name)}:{_written(inner, quote)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_written(inner, quote) for inner in value) + "]"
    return "null" if value is None else "true" if value is True else "false"


def _why(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return str(error) or "this is no JSON"
