"""Pages are rendered here, and nowhere else, and so are their addresses. Every value that a template shows passes
``printable`` and is escaped after that, without a template having to ask for it: names and payloads are hostile. Charts
are made of numbers.

A stream's name may hold any byte, and an address may not: a name travels percent-encoded, as plain ASCII, in links,
forms and events alike, and nobody on the way has to understand it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote, unquote_to_bytes, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from millstream.model import EntryId
from millstream.observe import duration, harmless, moment, printable, size
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


LIVE = "live_"
"""Blocks of a template that are sent anew while a page is open begin with this."""
_SHOWN = 120


def short(text: Any, most: int = _SHOWN) -> str:
    """The beginning of a long text, and how long it is."""
    text = str(text)
    return text if len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"


def count(number: int) -> str:
    return f"{number:,}"


def rate(number: float) -> str:
    """A number a second: small ones with a digit behind the point."""
    return f"{number:,.1f}" if 0 < number < 10 else f"{number:,.0f}"


def block(text: str) -> Markup:
    """A text of several lines, for ``pre``."""
    return escape(harmless(text))


def clock(ms: int) -> str:
    """A moment, such as 2026-01-31 12:00:00 UTC."""
    when = moment(ms)
    return when.strftime("%Y-%m-%d %H:%M:%S UTC") if when else "no time"


def time_of(entry_id: EntryId) -> str:
    """When an id was made; empty where it is no time."""
    return clock(entry_id.ms) if moment(entry_id.ms) else ""


def _shown(value: Any) -> Any:
    """What every ``{{ }}`` goes through before it is escaped."""
    return value if isinstance(value, Markup) or not isinstance(value, str | bytes) else printable(value)


# --- charts ---


def curve(points: Sequence[float | None], what: str, *, wide: bool = False) -> Markup:
    """A line over time. The number that it ends with stands beside it; its range is told to those who cannot see it."""
    known = [point for point in points if point is not None]
    if len(known) < 2:  # its place stays empty, so that numbers stand below each other
        return Markup('<span class="curve{}"></span>').format(" wide" if wide else "")
    top = max(known) or 1.0
    width, height = 100.0, 20.0
    step = width / (len(known) - 1)
    at = [(n * step, height - 1 - (height - 2) * point / top) for n, point in enumerate(known)]
    line = " ".join(f"{'M' if n == 0 else 'L'}{x:.1f} {y:.1f}" for n, (x, y) in enumerate(at))
    told = (
        f"{what}: from {rate(min(known))} to {rate(max(known))} over the last {len(known)} looks, now {rate(known[-1])}"
    )
    return Markup(
        '<svg class="curve{}" viewBox="0 0 100 20" preserveAspectRatio="none" role="img" aria-label="{}">'
        '<title>{}</title><path class="area" d="{} L100 20 L0 20 Z"/><path class="line" d="{}"/></svg>'
    ).format(" wide" if wide else "", told, told, line, line)


class BatchBar(NamedTuple):
    """A bar: how long a batch took; None while it is not committed."""

    id: int
    planned: str
    ms: int | None


_BAR = Markup('<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"><title>{}</title></rect>')


def bars(batches: Sequence[BatchBar]) -> Markup:
    """A bar for each batch, as high as it took long."""
    top = max((batch.ms or 0 for batch in batches), default=0) or 1
    slot = 300.0 / max(30, len(batches))
    drawn = [Markup('<line x1="0" x2="300" y1="59.5" y2="59.5"/>')]
    for n, batch in enumerate(batches):
        high = 56.0 if batch.ms is None else max(1.0, 56.0 * batch.ms / top)
        kind = "open" if batch.ms is None else "done"
        took = "not committed yet" if batch.ms is None else duration(batch.ms)
        told = f"batch {batch.id}: {took}"
        drawn.append(_BAR.format(kind, n * slot, 59 - high, slot * 0.7, high, told))
    first, last = batches[0], batches[-1]
    return Markup(
        '<svg class="bars" viewBox="0 0 300 60" preserveAspectRatio="none" role="img" aria-label="{}">{}</svg>'
        '<p class="axis">Batches {} to {}; the longest took {}.</p>'
    ).format(f"How long the last {len(batches)} batches took", Markup("").join(drawn), first.id, last.id, duration(top))


def timeline(events: Sequence[Any]) -> Markup:
    """A dot for each moment (``at_ms``), from the first to the last."""
    if not events:
        return Markup('<p class="empty">No stream has changed hands.</p>')
    moments = [event.at_ms for event in events]
    first, last = min(moments), max(moments)
    span = max(1, last - first)
    dots = Markup("").join(
        Markup('<circle cx="{:.1f}%" cy="50%" r="4.5"/>').format(1 + 98 * (moment - first) / span) for moment in moments
    )
    return Markup(
        '<svg class="timeline" role="img" aria-label="{}"><line x1="0" x2="100%" y1="50%" y2="50%"/>{}'
        '</svg><p class="axis"><span>{}</span><span>{}</span></p>'
    ).format(f"{len(moments)} take-overs", dots, clock(first), clock(last))


# --- pages ---


class Renderer:
    def __init__(self) -> None:
        self._templates = Environment(
            loader=PackageLoader("millstream.dashboard"),
            autoescape=True,
            finalize=_shown,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters.update(
            {"short": short, "count": count, "rate": rate, "size": size, "duration": duration, "block": block}
        )
        self._templates.globals.update({"curve": curve, "bars": bars, "timeline": timeline})

    def page(self, template: str, root: str, values: Mapping[str, Any]) -> str:
        return self._templates.get_template(template).render(self._values(root, values))

    def parts(self, template: str, root: str, values: Mapping[str, Any]) -> dict[str, str]:
        """The live blocks alone, by the id of the element that holds them."""
        found = self._templates.get_template(template)
        context = found.new_context(self._values(root, values))
        names = [name for name in found.blocks if name.startswith(LIVE)]
        return {name: "".join(found.blocks[name](context)) for name in names}

    def _values(self, root: str, values: Mapping[str, Any]) -> dict[str, Any]:
        at = _addresses(root)
        given = {**values, "root": root, "at": at, "link": _links(at)}
        given["parts"] = self._templates.get_template("parts.html").make_module(given)
        return given


def _addresses(root: str) -> Callable[..., str]:
    """``at("/stream", name=...)``: a page's address under wherever the dashboard is mounted."""

    def at(path: str, **parameters: str) -> str:
        names = ("name", "dlq", "service")
        words = [(key, name_word(value) if key in names else str(value)) for key, value in parameters.items()]
        return root + address(path, words)

    return at


def _links(at: Callable[..., str]) -> Callable[..., Markup]:
    def link(path: str, name: str, *, param: str = "name", text: str | None = None) -> Markup:
        """A name that leads to its page; one that no address could carry is shown alone."""
        shown = printable(short(name if text is None else text))
        if not name or len(name_word(name)) > MOST_WORD:
            return Markup('<span title="this name is too long for an address">{}</span>').format(shown)
        to = at(path, **{param: name})
        return Markup('<a href="{}">{}</a>').format(to, shown)

    return link
