"""Renders all pages, their parts, their URLs and their charts.

Names and payloads are untrusted. So every value in a template passes ``printable`` and is then escaped, without any
markup in the template. Charts are elements from numbers only.

A stream's name may hold any byte, but a URL may not. So names are encoded to ASCII in links, forms and events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote, unquote_to_bytes, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from millstream.model import EntryId
from millstream.observe.format import duration, harmless, moment, printable, size
from millstream.wire import to_bytes, to_name

MAX_PARAMETER_LENGTH = 8_000
"""Servers and proxies reject longer URLs, so longer names are shown without a link."""
MAX_PARAMETERS = 1_100
"""A form has one parameter for each selected dead letter."""
_READABLE = "/:{}@,;!*()$"
_PRINTABLE = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")


def encode_name(name: str) -> str:
    """Encode a name as printable ASCII, for use as a parameter's value in ``address``, in forms and in events.

    Printable ASCII is kept, except the percent sign: ``address`` encodes it for the URL, once.
    """
    return quote(to_bytes(name), safe=_PRINTABLE)


def decode_name(encoded: str) -> str:
    """Decode a name from a parameter. Plain text that a user typed into the URL is accepted too."""
    return to_name(unquote_to_bytes(encoded))


class Query:
    """The parameters of a URL or of a form."""

    def __init__(self, raw: bytes | str) -> None:
        text = raw.decode("latin-1") if isinstance(raw, bytes) else raw
        try:
            pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=MAX_PARAMETERS)
        except ValueError:
            pairs = []
        self._pairs = pairs

    def text(self, name: str, default: str = "", *, max_length: int = 200) -> str:
        """Return the first value of a parameter, cut to ``max_length`` characters."""
        return next((value for key, value in self._pairs if key == name), default)[:max_length]

    def name(self, parameter: str) -> str:
        """Return the decoded name of a stream, group or service; empty if it is missing or too long."""
        encoded = next((value for key, value in self._pairs if key == parameter), "")
        return decode_name(encoded) if len(encoded) <= MAX_PARAMETER_LENGTH else ""

    def all(self, name: str) -> list[str]:
        return [value for key, value in self._pairs if key == name]

    def number(self, name: str, default: int, *, maximum: int) -> int:
        text = self.text(name, max_length=10)
        return min(int(text), maximum) if text.isascii() and text.isdecimal() else default


def address(path: str, parameters: Iterable[tuple[str, str]] = ()) -> str:
    """Append the parameters that have a value to a path."""
    query = urlencode([(name, value) for name, value in parameters if value != ""], safe=_READABLE)
    return f"{path}?{query}" if query else path


def local_address(text: str, default: str = "/") -> str:
    """Return ``text`` if it is a path of the dashboard, else ``default``: prevents redirects to other sites."""
    is_plain = text.isascii() and text.isprintable() and "\\" not in text
    return text if is_plain and text.startswith("/") and not text.startswith("//") else default


LIVE = "live_"
"""Prefix of the template blocks that are updated while a page is open."""
DEFAULT_MAX_LENGTH = 120


def short(text: Any, max_length: int = DEFAULT_MAX_LENGTH) -> str:
    """Cut a long text and append its length."""
    text = str(text)
    return text if len(text) <= max_length else f"{text[:max_length]}… ({len(text):,} characters)"


def count(number: int) -> str:
    return f"{number:,}"


def rate(number: float) -> str:
    """Format a rate per second; below 10 with one decimal."""
    return f"{number:,.1f}" if 0 < number < 10 else f"{number:,.0f}"


def block(text: str) -> Markup:
    """Format a text of several lines for ``pre``."""
    return escape(harmless(text))


def clock(ms: int) -> str:
    """Format a time, such as 2026-01-31 12:00:00 UTC."""
    when = moment(ms)
    return when.strftime("%Y-%m-%d %H:%M:%S UTC") if when else "no time"


def time_of(entry_id: EntryId) -> str:
    """Format the time of an id; empty if the id is not a time."""
    return clock(entry_id.ms) if moment(entry_id.ms) else ""


def _finalize(value: Any) -> Any:
    """Jinja applies this to every ``{{ }}`` before it escapes the value."""
    return value if isinstance(value, Markup) or not isinstance(value, str | bytes) else printable(value)


# --- charts ---


def curve(points: Sequence[float | None], what: str, *, wide: bool = False) -> Markup:
    """Draw values over time as a line. The label states the range for screen readers."""
    readings = [point for point in points if point is not None]
    if len(readings) < 2:  # an empty placeholder keeps the numbers of a column aligned
        return Markup('<span class="curve{}"></span>').format(" wide" if wide else "")
    top = max(readings) or 1.0
    width, height = 100.0, 20.0
    step = width / (len(readings) - 1)
    at = [(n * step, height - 1 - (height - 2) * point / top) for n, point in enumerate(readings)]
    line = " ".join(f"{'M' if n == 0 else 'L'}{x:.1f} {y:.1f}" for n, (x, y) in enumerate(at))
    span = f"from {rate(min(readings))} to {rate(max(readings))} over the last {len(readings)} readings"
    label = f"{what}: {span}, now {rate(readings[-1])}"
    return Markup(
        '<svg class="curve{}" viewBox="0 0 100 20" preserveAspectRatio="none" role="img" aria-label="{}">'
        '<title>{}</title><path class="area" d="{} L100 20 L0 20 Z"/><path class="line" d="{}"/></svg>'
    ).format(" wide" if wide else "", label, label, line, line)


class BatchBar(NamedTuple):
    """A batch in a bar chart. ``ms``: its duration; None while it is not committed."""

    id: int
    planned: str
    ms: int | None


_BAR = Markup('<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"><title>{}</title></rect>')


def bars(batches: Sequence[BatchBar]) -> Markup:
    """Draw the durations of batches as bars."""
    top = max((batch.ms or 0 for batch in batches), default=0) or 1
    slot = 300.0 / max(30, len(batches))
    elements = [Markup('<line x1="0" x2="300" y1="59.5" y2="59.5"/>')]
    for n, batch in enumerate(batches):
        height = 56.0 if batch.ms is None else max(1.0, 56.0 * batch.ms / top)
        kind = "open" if batch.ms is None else "done"
        took = "not committed yet" if batch.ms is None else duration(batch.ms)
        label = f"batch {batch.id}: {took}"
        elements.append(_BAR.format(kind, n * slot, 59 - height, slot * 0.7, height, label))
    first, last = batches[0], batches[-1]
    return Markup(
        '<svg class="bars" viewBox="0 0 300 60" preserveAspectRatio="none" role="img" aria-label="{}">{}</svg>'
        '<p class="axis">Batches {} to {}; the longest took {}.{}</p>'
    ).format(
        f"How long the last {len(batches)} batches took",
        Markup("").join(elements),
        first.id,
        last.id,
        duration(top),
        " The batch in another colour is not committed yet." if any(batch.ms is None for batch in batches) else "",
    )


def timeline(events: Sequence[Any]) -> Markup:
    """Draw a dot for the time (``at_ms``) of each event."""
    if not events:
        return Markup('<p class="empty">No stream has changed its owner.</p>')
    times = [event.at_ms for event in events]
    first, last = min(times), max(times)
    span = max(1, last - first)
    dots = Markup("").join(
        Markup('<circle cx="{:.1f}%" cy="50%" r="4.5"/>').format(1 + 98 * (at_ms - first) / span) for at_ms in times
    )
    return Markup(
        '<svg class="timeline" role="img" aria-label="{}"><line x1="0" x2="100%" y1="50%" y2="50%"/>{}'
        '</svg><p class="axis"><span>{}</span><span>{}</span></p>'
    ).format(f"{len(times)} changes of owner", dots, clock(first), clock(last))


# --- pages ---


class Renderer:
    """Renders the templates."""

    def __init__(self) -> None:
        self._templates = Environment(
            loader=PackageLoader("millstream.dashboard"),
            autoescape=True,
            finalize=_finalize,
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
        """Render only the live blocks, by the id of the HTML element that contains each."""
        loaded = self._templates.get_template(template)
        context = loaded.new_context(self._values(root, values))
        names = [name for name in loaded.blocks if name.startswith(LIVE)]
        return {name: "".join(loaded.blocks[name](context)) for name in names}

    def _values(self, root: str, values: Mapping[str, Any]) -> dict[str, Any]:
        at = _addresses(root)
        all_values = {**values, "root": root, "at": at, "link": _links(at)}
        all_values["parts"] = self._templates.get_template("parts.html").make_module(all_values)
        return all_values


def _addresses(root: str) -> Callable[..., str]:
    """Return ``at``: ``at("/stream", name=...)`` is the URL of a page under the path where the dashboard is mounted."""

    def at(path: str, **parameters: str) -> str:
        names = ("name", "dlq", "service")
        encoded = [(key, encode_name(value) if key in names else str(value)) for key, value in parameters.items()]
        return root + address(path, encoded)

    return at


def _links(at: Callable[..., str]) -> Callable[..., Markup]:
    def link(path: str, name: str, *, param: str = "name", text: str | None = None) -> Markup:
        """Link a name to its page; a name that is too long for a URL is shown without a link."""
        label = printable(short(name if text is None else text))
        if not name or len(encode_name(name)) > MAX_PARAMETER_LENGTH:
            return Markup('<span title="this name is too long for a URL">{}</span>').format(label)
        url = at(path, **{param: name})
        return Markup('<a href="{}">{}</a>').format(url, label)

    return link
