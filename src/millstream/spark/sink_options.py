"""What a sink may be asked for, and where a write goes: to one place, or to several at once. Pure.

Beside the options of both sides (``options``)
    stream          where rows go: a name, or a template such as ``orders.${region}``, filled from columns. Without it
                    the column ``stream`` decides. The option wins over the column.
    content         auto (default): a map column ``fields``, else a column ``value``, else every column is a field;
                    or one of ``fields``, ``value``, ``columns``.
    idColumn        the column that holds explicit ids; each must be greater than the stream's last, so a stream's rows
                    come sorted and in one partition. The ids of a chunk are checked before any of it is written.
    maxlen, minid   a hard cap on the stream; ``~`` before the number trims whole nodes only, which is cheaper.
    durability      memory, appended, fsynced or replicated(n).
    delivery        exactly_once (default), exactly_once_by_event_id, at_least_once.
    eventIdColumn, eventIdWindow (default 24h)
                    for exactly_once_by_event_id: the column that identifies an event, and how long it is remembered.
    txnAppId, txnVersion
                    the identity of a batch write (also in foreachBatch), in Delta's names: a write of the same
                    application with the same version adds nothing twice, one with a lower version is refused.
    sinkId          tells several writes of one batch into one stream apart (default ``sink``).
    forgetAfter     how long a writer's position is remembered after its last write (default 7d).
    chunkRows       rows in one atomic step at most (default 1000); may change between restarts.
    report          batch writes only: a file on the driver's machine that tells what was written, once it is: JSON with
                    ``rows``, ``bytes`` (of the field ``valueField``), and ``oldest`` and ``newest`` of
    timeColumn      a column of whole numbers, which becomes no field.
    also.<name>.<option>
                    one more place for the same rows, written in the same pass: its url, its stream,
                    its cap... ``<name>`` is its sinkId. What is not said of it is as for the first.

Further places get the same rows, which Spark then makes and hands over once. Each has an address, a stream and a
position of its own.

What a write was is measured in the tasks as rows pass, added up when all of them are done, and told in the ``report``:
Spark hands a writer's count back to nobody, and an observation of its own slows a write down (decision 9).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Final, Literal, NamedTuple

from millstream.errors import InvalidArgument
from millstream.model import Durability, EntryId, TrimPolicy
from millstream.spark.connection import Address
from millstream.spark.errors import InvalidOption
from millstream.spark.options import ADDRESS, BOTH_SIDES, GivenOptions, address_of

Delivery = Literal["exactly_once", "exactly_once_by_event_id", "at_least_once"]
Content = Literal["auto", "fields", "value", "columns"]
SINK_OPTIONS: Final = (
    *BOTH_SIDES,
    "stream",
    "content",
    "idColumn",
    "maxlen",
    "minid",
    "durability",
    "delivery",
    "eventIdColumn",
    "eventIdWindow",
    "txnAppId",
    "txnVersion",
    "sinkId",
    "forgetAfter",
    "chunkRows",
    "report",
    "timeColumn",
)
_SPARKS_OWN: Final = frozenset({"checkpointlocation", "queryname", "outputmode", "path"})
"""Spark hands some of its own settings to the sink as well."""

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


@dataclass(frozen=True, slots=True)
class SinkOptions:
    address: Address
    stream: str | None = None
    content: Content = "auto"
    value_field: str = "event"
    id_column: str | None = None
    trim: TrimPolicy | None = None
    durability: Durability | None = None
    delivery: Delivery = "exactly_once"
    event_id_column: str | None = None
    event_id_window_ms: int = 86_400_000
    txn_app_id: str | None = None
    txn_version: int | None = None
    sink_id: str = "sink"
    forget_after_ms: int = 7 * 86_400_000
    chunk_rows: int = 1000
    report: str | None = None
    time_column: str | None = None


def sink_options(raw: Mapping[str, str], *, streaming: bool) -> SinkOptions:
    """Reads the sink's options; an InvalidOption names the first that is wrong."""
    given = GivenOptions(raw, SINK_OPTIONS, _SPARKS_OWN)
    delivery = given.choice("delivery", "exactly_once", ("exactly_once", "exactly_once_by_event_id", "at_least_once"))
    app, version = given.text("txnAppId"), given.number("txnVersion", None, least=0)
    if (app is None) != (version is None):
        raise InvalidOption("txnVersion" if version is None else "txnAppId", None, "txnAppId and txnVersion together")
    if streaming and app is not None:
        raise InvalidOption("txnAppId", app, "it in batch writes only; a streaming write has its query and batch id")
    event_id = given.text("eventIdColumn")
    if (delivery == "exactly_once_by_event_id") != (event_id is not None):
        raise InvalidOption(
            "eventIdColumn", event_id, "it together with delivery=exactly_once_by_event_id, and only so"
        )
    id_column = given.text("idColumn")
    if id_column is not None and delivery != "exactly_once":
        raise InvalidOption("idColumn", id_column, "it with delivery exactly_once")
    report, time_column = given.text("report"), given.text("timeColumn")
    if streaming and report is not None:
        raise InvalidOption("report", report, "it in batch writes only; a streaming query tells its progress")
    if time_column is not None and report is None:
        raise InvalidOption("timeColumn", time_column, "it together with report")
    return SinkOptions(
        address=address_of(given),
        stream=given.text("stream"),
        content=given.choice("content", "auto", ("auto", "fields", "value", "columns")),  # type: ignore[arg-type]  # choice gives one of these
        value_field=given.text("valueField") or "event",
        id_column=id_column,
        trim=_trim(given),
        durability=_durability(given.text("durability")),
        delivery=delivery,  # type: ignore[arg-type]  # choice gives one of these
        event_id_column=event_id,
        event_id_window_ms=given.duration_ms("eventIdWindow", 86_400_000),
        txn_app_id=app,
        txn_version=version,
        sink_id=given.text("sinkId") or "sink",
        forget_after_ms=given.duration_ms("forgetAfter", 7 * 86_400_000),
        chunk_rows=given.whole("chunkRows", 1000),
        report=report,
        time_column=time_column,
    )


def _trim(given: GivenOptions) -> TrimPolicy | None:
    maxlen, minid = given.text("maxlen"), given.text("minid")
    if maxlen is None and minid is None:
        return None
    if maxlen is not None and minid is not None:
        raise InvalidOption("minid", minid, "only one of maxlen and minid")
    if maxlen is not None:
        text = maxlen.removeprefix("~")
        if not text.isdigit():
            raise InvalidOption("maxlen", maxlen, "a whole number, with ~ before it for a cheaper, approximate cap")
        return TrimPolicy(max_len=int(text), approximate=maxlen.startswith("~"))
    assert minid is not None
    try:
        return TrimPolicy(min_id=EntryId.parse(minid.removeprefix("~")), approximate=minid.startswith("~"))
    except InvalidArgument:
        raise InvalidOption("minid", minid, "an id such as 1526919030474-55") from None


def _durability(text: str | None) -> Durability | None:
    if text is None:
        return None
    try:
        return Durability.parse(text)
    except InvalidArgument:
        raise InvalidOption("durability", text, "memory, appended, fsynced or replicated(n)") from None


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


class Delivered(NamedTuple):
    """What a sink got. ``bytes`` are those of the events' text; ``oldest`` and ``newest`` of their times: None where no
    row has one. ``dropped``: entries that a hard cap took before a group had read them."""

    rows: int = 0
    bytes: int = 0
    oldest: int | None = None
    newest: int | None = None
    dropped: int = 0

    def plus(self, other: Delivered) -> Delivered:
        return Delivered(
            self.rows + other.rows,
            self.bytes + other.bytes,
            min((time for time in (self.oldest, other.oldest) if time is not None), default=None),
            max((time for time in (self.newest, other.newest) if time is not None), default=None),
            self.dropped + other.dropped,
        )


def total(parts: Iterable[Delivered]) -> Delivered:
    return reduce(Delivered.plus, parts, Delivered())


def write_report(path: str, parts: Iterable[Delivered]) -> None:
    """Before the write returns: whoever waits for that finds the whole file."""
    Path(path).write_text(json.dumps(total(parts)._asdict()))


def read_report(path: str) -> Delivered:
    return Delivered(**json.loads(Path(path).read_text()))
