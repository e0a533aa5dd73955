"""Addresses of pages. A stream's name may hold any byte, and an address may not: a name travels percent-encoded, as
plain ASCII, in links, forms and events alike, and nobody on the way has to understand it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import parse_qsl, quote, unquote_to_bytes, urlencode

from millstream.wire import to_bytes, to_name

MOST_WORD = 8_000
"""Servers and proxies refuse longer addresses: what is named longer is shown, and not linked."""
MOST_PARAMETERS = 1_100
"""A form that marks a page of letters has one for each."""
_READABLE = "/:{}@,;!*()$"


def name_word(name: str) -> str:
    """A name as a value of a parameter."""
    return quote(to_bytes(name), safe=_READABLE)


def word_name(word: str) -> str:
    """The name that a parameter stands for. Typed by hand, it may be plain text too."""
    return to_name(unquote_to_bytes(word))


class Query:
    """The parameters of an address or of a form: the first of each name, or all of them."""

    def __init__(self, raw: bytes | str) -> None:
        text = raw.decode("latin-1") if isinstance(raw, bytes) else raw
        try:
            pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=MOST_PARAMETERS)
        except ValueError:
            pairs = []
        self._pairs = pairs

    def text(self, name: str, default: str = "", *, most: int = 200) -> str:
        """What was typed, cut to what is taken."""
        return next((value for key, value in self._pairs if key == name), default)[:most]

    def name(self, parameter: str) -> str:
        """A stream's, a group's or a service's name; empty where there is none."""
        word = next((value for key, value in self._pairs if key == parameter), "")
        return word_name(word) if len(word) <= MOST_WORD else ""

    def all(self, name: str) -> list[str]:
        return [value for key, value in self._pairs if key == name]

    def number(self, name: str, default: int, *, most: int) -> int:
        text = self.text(name, most=10)
        return min(int(text), most) if text.isascii() and text.isdecimal() else default


def address(path: str, parameters: Iterable[tuple[str, str]] = ()) -> str:
    """A path with the parameters that have a value."""
    query = urlencode([(name, value) for name, value in parameters if value != ""], safe=_READABLE)
    return f"{path}?{query}" if query else path


def local_address(text: str, otherwise: str = "/") -> str:
    """Where to go back to: an address of our own, whatever was asked for."""
    plain = text.isascii() and text.isprintable() and "\\" not in text
    return text if plain and text.startswith("/") and not text.startswith("//") else otherwise
