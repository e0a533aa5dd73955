"""Rows for a screen of any width: numbers and ids stay whole, names give way, no row is longer than the screen. Pure.

A column names the key of its value in an item; items hold plain values (numbers, ids, times), so that the same items
are the JSON of a command. What a person reads is made here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, NamedTuple

from rich.cells import cell_len, chop_cells

from millstream.model import EntryId
from millstream.observe import age, duration, printable, size

GAP = 2
ROOM_FOR_A_NAME = 12
LEAST = 4

Giving = Literal["not", "middle", "end"]
"""How a value makes room: a number or an id not at all, a name in its middle, a sentence at its end."""


@dataclass(frozen=True, slots=True)
class ShownColumn:
    """``spare``: left out first where there is no room, the last one first; the JSON has it still."""

    key: str
    title: str
    giving: Giving = "middle"
    right: bool = False
    spare: bool = False
    shown: Callable[[Any], str] = printable


def _count(value: Any) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"


def _yes_or_no(value: Any) -> str:
    return "yes" if value else "no"


def name(key: str, title: str = "", *, spare: bool = False) -> ShownColumn:
    return ShownColumn(key, title or _title(key), spare=spare)


def text(key: str, title: str = "", *, spare: bool = False, shown: Callable[[Any], str] | None = None) -> ShownColumn:
    return ShownColumn(
        key, title or _title(key), "end", spare=spare, shown=shown or (lambda value: printable(str(value)))
    )


def number(key: str, title: str = "", *, spare: bool = False) -> ShownColumn:
    return ShownColumn(key, title or _title(key), "not", True, spare, _count)


def ident(key: str, title: str = "", *, spare: bool = False) -> ShownColumn:
    """An id or a token: a number that nobody adds up, so it has no thousands."""
    return ShownColumn(key, title or _title(key), "not", False, spare, lambda value: printable(str(value)))


def flag(key: str, title: str = "") -> ShownColumn:
    return ShownColumn(key, title or _title(key), "not", shown=_yes_or_no)


def span(key: str, title: str = "", *, spare: bool = False) -> ShownColumn:
    """Milliseconds, as people say them."""
    return ShownColumn(key, title or _title(key), "not", True, spare, duration)


def memory(key: str, title: str = "memory") -> ShownColumn:
    return ShownColumn(key, title, "not", True, False, size)


def ago(key: str, now_ms: int, title: str = "", *, spare: bool = False) -> ShownColumn:
    """A time, as how long ago it was by the server's clock."""

    def shown(value: datetime) -> str:
        return age(now_ms, EntryId(round(value.timestamp() * 1000), 0))

    return ShownColumn(key, title or _title(key), "not", True, spare, shown)


def _title(key: str) -> str:
    return key.replace("_", " ")


class Layout(NamedTuple):
    """What fits: the columns that are shown, their widths, their cells, and those that there was no room for."""

    columns: Sequence[ShownColumn]
    widths: Sequence[int]
    cells: Sequence[Sequence[str]]
    left_out: Sequence[ShownColumn]

    def line(self, cells: Sequence[str]) -> str:
        return (" " * GAP).join(map(self.padded, range(len(cells)), cells)).rstrip()

    def padded(self, at: int, cell: str) -> str:
        space = " " * (self.widths[at] - cell_len(cell))
        return space + cell if self.columns[at].right else cell + space

    def header(self) -> str:
        return self.line([cut(one.title, width, "end") for one, width in zip(self.columns, self.widths, strict=True)])

    def lines(self) -> list[str]:
        return [self.line(row) for row in self.cells]


def lay_out(columns: Sequence[ShownColumn], items: Sequence[Mapping[str, Any]], width: int | None) -> Layout:
    """``width`` None: as wide as it likes to be, for a pipe."""
    cells = {one.key: [_cell(one, item.get(one.key)) for item in items] for one in columns}
    natural = {one.key: max(map(cell_len, [one.title, *cells[one.key]])) for one in columns}
    chosen, left_out = list(columns), []
    if width is not None:
        while len(chosen) > 1 and _needed(chosen, natural, ROOM_FOR_A_NAME) > width:
            spare = next((one for one in reversed(chosen) if one.spare), None)
            if spare is None:
                break
            chosen.remove(spare)
            left_out.append(spare)
        while len(chosen) > 1 and _needed(chosen, natural, LEAST) > width:
            left_out.append(chosen.pop())
    widths = _shrunk(chosen, natural, width)
    shown = [
        [cut(cells[one.key][at], room, one.giving) for one, room in zip(chosen, widths, strict=True)]
        for at in range(len(items))
    ]
    return Layout(chosen, widths, shown, left_out)


def _cell(column: ShownColumn, value: Any) -> str:
    return "-" if value is None else column.shown(value)


def _needed(columns: Sequence[ShownColumn], natural: Mapping[str, int], room: int) -> int:
    least = [natural[one.key] if one.giving == "not" else min(natural[one.key], room) for one in columns]
    return sum(least) + GAP * (len(columns) - 1)


def _shrunk(columns: Sequence[ShownColumn], natural: Mapping[str, int], width: int | None) -> list[int]:
    widths = [natural[one.key] for one in columns]
    if width is None:
        return widths
    giving = [at for at, one in enumerate(columns) if one.giving != "not"]
    over = sum(widths) + GAP * (len(widths) - 1) - width
    while over > 0 and giving:
        widest = max(giving, key=lambda at: widths[at])
        if widths[widest] <= LEAST:
            break
        widths[widest] -= 1
        over -= 1
    if over > 0:  # one column of numbers that is wider than the screen
        widths[-1] = max(1, widths[-1] - over)
    return widths


def cut(text: str, width: int, giving: Giving) -> str:
    """The text in at most ``width`` cells: a name keeps its beginning and its end, a sentence its beginning."""
    if cell_len(text) <= width:
        return text
    if width <= 1:
        return "…"[:width]
    if giving == "middle":
        tail = _fitting(text[::-1], (width - 1) // 2)[::-1]
        return _fitting(text, width - 1 - cell_len(tail)) + "…" + tail
    return _fitting(text, width - 1) + "…"


def _fitting(text: str, width: int) -> str:
    return chop_cells(text[: width + 1], width)[0] if width and text else ""
