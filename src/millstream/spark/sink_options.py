"""Options of the sink, and the one or more targets of a write. No I/O.

Besides the options of both sides (``options``)
    stream          the target stream: a name, or a template such as ``orders.${region}``, filled from columns. Default:
                    the column ``stream``, which this option overrides.
    content         auto (default): a map column ``fields``, else a column ``value``, else every column is a field;
                    or one of ``fields``, ``value``, ``columns``.
    idColumn        the column of explicit ids; each must be greater than the stream's last, so a stream's rows must be
                    sorted and in one partition. The ids of a chunk are checked before any of it is written.
    maxlen, minid   a hard cap on the stream; ``~`` before the number only removes whole nodes, which is cheaper.
    durability      memory, appended, fsynced or replicated(n).
    delivery        exactly_once (default), exactly_once_by_event_id, at_least_once.
    eventIdColumn, eventIdWindow (default 24h)
                    for exactly_once_by_event_id: the column that identifies an event, and how long its id is stored.
    txnAppId, txnVersion
                    the identity of a batch write (also in foreachBatch), named as in Delta: a write of the same
                    application and version adds no row twice, one with a lower version is rejected.
    sinkId          distinguishes several writes of one batch to one stream (default ``sink``).
    forgetAfter     how long a writer's position is stored after its last write (default 7d).
    fence           a key and the value that it must hold, with a space between: nothing is written unless the key holds
                    it, which is checked in the same atomic step. The key is on the same server, on Cluster in the slot
                    of the stream; ``none`` for no check. Pipelines set it.
    chunkRows       maximum number of rows in one atomic step (default 1000); may change between restarts.
    report          batch writes only: a file on the driver's machine that reports a finished write. It is JSON with
                    ``rows``, ``bytes`` (of the field ``valueField``), ``added``, ``skipped`` (rows that were already
                    stored) and ``dropped`` over all targets, the same for each target under ``places`` if there are
                    several, and ``oldest`` and ``newest`` of ``timeColumn``.
    timeColumn      a column of whole numbers, which does not become a field.
    also.<name>.<option>
                    one more target for the same rows, written in the same pass: its url, its stream, its cap and so
                    on. ``<name>`` is its sinkId. Options that are not given are those of the first target.

Further targets receive the same rows, which Spark produces once. Each has its own address, stream and position.

The tasks measure rows while they write them, and the driver adds the numbers up and writes the ``report``: Spark does
not return a writer's counts, and its observations slow a write down (decision 9).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Final, Literal, NamedTuple

from millstream.broker.scripts.script import Fence
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
    "fence",
    "chunkRows",
    "report",
    "timeColumn",
)
_SPARK_SETTINGS: Final = frozenset({"checkpointlocation", "queryname", "outputmode", "path"})
"""Spark passes some of its own settings to the sink."""

_TARGET_OPTIONS: Final = (
    *ADDRESS,
    "stream",
    "maxlen",
    "minid",
    "durability",
    "eventIdWindow",
    "sinkId",
    "forgetAfter",
    "fence",
    "chunkRows",
)
"""Options that may differ between targets. Those of the row format may not, because rows are converted once."""
_PREFIX: Final = "also."
_COUNTED: Final = ("added", "skipped", "dropped")


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
    fence: Fence | None = None


def sink_options(raw: Mapping[str, str], *, streaming: bool) -> SinkOptions:
    """Parses the sink's options. Raises InvalidOption for the first option that is not valid."""
    options = GivenOptions(raw, SINK_OPTIONS, _SPARK_SETTINGS)
    delivery = options.choice("delivery", "exactly_once", ("exactly_once", "exactly_once_by_event_id", "at_least_once"))
    app, version = options.text("txnAppId"), options.number("txnVersion", None, least=0)
    if (app is None) != (version is None):
        raise InvalidOption("txnVersion" if version is None else "txnAppId", None, "txnAppId and txnVersion together")
    if streaming and app is not None:
        raise InvalidOption("txnAppId", app, "it in batch writes only; a streaming write has its query and batch id")
    event_id = options.text("eventIdColumn")
    if (delivery == "exactly_once_by_event_id") != (event_id is not None):
        raise InvalidOption(
            "eventIdColumn", event_id, "it together with delivery=exactly_once_by_event_id, and only so"
        )
    id_column = options.text("idColumn")
    if id_column is not None and delivery != "exactly_once":
        raise InvalidOption("idColumn", id_column, "it with delivery exactly_once")
    report, time_column = options.text("report"), options.text("timeColumn")
    if streaming and report is not None:
        raise InvalidOption("report", report, "it in batch writes only; a streaming query reports its progress")
    if time_column is not None and report is None:
        raise InvalidOption("timeColumn", time_column, "it together with report")
    return SinkOptions(
        address=address_of(options),
        stream=options.text("stream"),
        content=options.choice("content", "auto", ("auto", "fields", "value", "columns")),  # type: ignore[arg-type]  # choice gives one of these
        value_field=options.text("valueField") or "event",
        id_column=id_column,
        trim=_trim(options),
        durability=_durability(options.text("durability")),
        delivery=delivery,  # type: ignore[arg-type]  # choice gives one of these
        event_id_column=event_id,
        event_id_window_ms=options.duration_ms("eventIdWindow", 86_400_000),
        txn_app_id=app,
        txn_version=version,
        sink_id=options.text("sinkId") or "sink",
        forget_after_ms=options.duration_ms("forgetAfter", 7 * 86_400_000),
        chunk_rows=options.whole("chunkRows", 1000),
        report=report,
        time_column=time_column,
        fence=_fence(options.text("fence"), delivery),
    )


def _fence(text: str | None, delivery: str) -> Fence | None:
    if text is None or text == "none":
        return None
    key, space, record = text.partition(" ")
    if not space or not key or not record:
        raise InvalidOption("fence", text, "a key and the value that it must hold, with a space between")
    if delivery == "at_least_once":
        raise InvalidOption("fence", text, "it with delivery exactly_once or exactly_once_by_event_id")
    return Fence(key.encode(), record.encode())


def _trim(options: GivenOptions) -> TrimPolicy | None:
    maxlen, minid = options.text("maxlen"), options.text("minid")
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
    """The options of each target, the main target first. Raises InvalidOption, as ``sink_options`` does."""
    first: dict[str, str] = {}
    further: dict[str, dict[str, str]] = {}
    for key, value in raw.items():
        if not key.lower().startswith(_PREFIX):
            first[key] = value
            continue
        name, _, option = key[len(_PREFIX) :].rpartition(".")
        if not name or option.lower() not in map(str.lower, _TARGET_OPTIONS):
            raise InvalidOption(key, "it", f"also.<name>.<option>, with one of: {', '.join(sorted(_TARGET_OPTIONS))}")
        further.setdefault(name, {})[option.lower()] = value
    targets = [sink_options(first, streaming=streaming)]
    defaults = {key.lower(): value for key, value in first.items()}
    for name, changes in further.items():
        try:
            targets.append(sink_options({**defaults, "sinkid": name, **changes}, streaming=streaming))
        except InvalidOption as error:
            raise InvalidOption(f"{_PREFIX}{name}.{error.option}", error.got, error.allowed) from None
    ids = [target.sink_id for target in targets]
    for at, sink_id in enumerate(ids):
        if sink_id in ids[:at]:
            raise InvalidOption(
                "sinkId", sink_id, "a different name for each target, because two targets would share one position"
            )
    return tuple(targets)


class Delivered(NamedTuple):
    """What was written to a sink.

    ``bytes``: of the events' text. ``oldest``, ``newest``: of their times, None if no row has one. ``dropped``: entries
    that a hard cap removed before a group read them. ``added`` and ``skipped``: rows that were stored, and rows that
    were stored before; None if the sink does not know. ``dropped``, ``added`` and ``skipped`` are sums over all
    targets; ``places`` has them by sink id if there are several targets."""

    rows: int = 0
    bytes: int = 0
    oldest: int | None = None
    newest: int | None = None
    dropped: int = 0
    added: int | None = None
    skipped: int | None = None
    places: dict[str, dict[str, int]] | None = None

    def numbers(self) -> dict[str, int]:
        """The numbers of the observer event ``pipeline.sink``."""
        optional = {name: count for name in ("added", "skipped") if (count := getattr(self, name)) is not None}
        return {"rows": self.rows, "bytes": self.bytes, "dropped": self.dropped, **optional}

    def of(self, sink_id: str) -> Delivered:
        """The same write, with the numbers of one target."""
        numbers = (self.places or {}).get(sink_id)
        return self if numbers is None else self._replace(**numbers, places=None)

    def plus(self, other: Delivered) -> Delivered:
        return Delivered(
            self.rows + other.rows,
            self.bytes + other.bytes,
            min((time for time in (self.oldest, other.oldest) if time is not None), default=None),
            max((time for time in (self.newest, other.newest) if time is not None), default=None),
            self.dropped + other.dropped,
            _sum(self.added, other.added),
            _sum(self.skipped, other.skipped),
            _merged(self.places, other.places),
        )


def _sum(left: int | None, right: int | None) -> int | None:
    return left if right is None else right if left is None else left + right


def _merged(
    left: dict[str, dict[str, int]] | None, right: dict[str, dict[str, int]] | None
) -> dict[str, dict[str, int]] | None:
    if left is None or right is None:
        return left or right
    return {
        sink_id: {name: left.get(sink_id, {}).get(name, 0) + right.get(sink_id, {}).get(name, 0) for name in _COUNTED}
        for sink_id in {**left, **right}
    }


def total(parts: Iterable[Delivered]) -> Delivered:
    return reduce(Delivered.plus, parts, Delivered())


def write_report(path: str, parts: Iterable[Delivered]) -> None:
    """Called before the write returns, so that the file is complete when it does."""
    Path(path).write_text(json.dumps(total(parts)._asdict()))


def read_report(path: str) -> Delivered:
    return Delivered(**json.loads(Path(path).read_text()))
