"""Where a write goes: to one place, or to several at once. ``also.<name>.<option>`` adds a place.

Further places get the same rows, which Spark then makes and hands over once. Each has an address, a stream and a
position of its own; what is not said of it is as for the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from millstream.spark.errors import InvalidOption
from millstream.spark.options import ADDRESS, SinkOptions, sink_options

_OWN: Final = (
    *ADDRESS,
    "stream",
    "maxlen",
    "minid",
    "durability",
    "eventIdWindow",
    "sinkId",
    "forgetAfter",
    "chunkRows",
)
"""What may differ from place to place. What rows look like may not: they are made once."""
_PREFIX: Final = "also."


def sink_targets(raw: Mapping[str, str], *, streaming: bool) -> tuple[SinkOptions, ...]:
    """The options of each place, the first one first. Raises InvalidOption, as ``sink_options`` does."""
    first: dict[str, str] = {}
    further: dict[str, dict[str, str]] = {}
    for given, value in raw.items():
        if not given.lower().startswith(_PREFIX):
            first[given] = value
            continue
        name, _, option = given[len(_PREFIX) :].rpartition(".")
        if not name or option.lower() not in map(str.lower, _OWN):
            raise InvalidOption(given, "it", f"also.<name>.<option>, with one of: {', '.join(sorted(_OWN))}")
        further.setdefault(name, {})[option.lower()] = value
    targets = [sink_options(first, streaming=streaming)]
    as_first = {given.lower(): value for given, value in first.items()}
    for name, own in further.items():
        try:
            targets.append(sink_options({**as_first, "sinkid": name, **own}, streaming=streaming))
        except InvalidOption as error:
            raise InvalidOption(f"{_PREFIX}{name}.{error.option}", error.got, error.allowed) from None
    ids = [target.sink_id for target in targets]
    for at, sink_id in enumerate(ids):
        if sink_id in ids[:at]:
            raise InvalidOption("sinkId", sink_id, "a name of its own for each place; two would share one position")
    return tuple(targets)
