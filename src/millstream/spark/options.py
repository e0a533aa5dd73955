"""What a query may ask for, read from Spark's text options into values. Pure: nothing connects here.

Names follow Spark's Kafka source and are case-insensitive. An unknown name is an error, so that a typo cannot pass.

Both sides
    url             redis://, rediss://, unix://, redis+sentinel:// or redis+cluster:// (with TLS rediss+...);
                    ``${NAME}`` in it is replaced from the environment of each process that connects.
                    Default: ``${MILLSTREAM_URL}``.
    urlFile         in its place: a file that holds the url, read where it is used.
    username, passwordFile, passwordEnv
                    who connects, and the file or the environment variable that holds the password, read where it is
                    used: so no secret lies in a plan, in a checkpoint or in a log.
    deadlineMs      how long a task tries on when the server does not answer (default 60000).
    connectTimeoutMs, answerTimeoutMs
                    within that: how long opening one connection may take, and how long a sent command may go without
                    an answer before its connection counts as broken and another is tried (default 5000 each).
    valueField      the field that the column ``value`` stands for (default ``event``).

Source
    subscribe       names of streams, separated by commas; or
    subscribePattern  a regular expression that a stream's whole name must match. Exactly one of the two.
    startingOffsets earliest, latest, or JSON such as {"orders": "1526919030474-55", "other": "earliest"}: reading
                    begins AFTER the id, as in XREAD and as a query's own offsets mean it. Streaming defaults to latest,
                    batch to earliest. A restarted query goes on from its checkpoint instead.
    startingTimestamp  milliseconds since 1970: reading begins with the first entry of that time or later.
    endingOffsets   batch only: latest (default), or JSON per stream; the named id is included.
    maxOffsetsPerTrigger  rows in one micro-batch at most, over all streams.
    minPartitions, maxRecordsPerPartition (default 250000)
                    a batch is cut into enough partitions for both.
    splitStreams    true (default). false: no stream is cut within a batch, so that its entries are read, and written,
                    in their order; there are then at most as many partitions as streams.
    failOnDataLoss  true (default): entries that were trimmed, possibly trimmed, before they were read are an error.
                    false: they are logged and counted.
    group           publishes progress as this consumer group's position, so that lag and safe trimming see the query.
    pageSize        entries in one XRANGE at most (default 5000; big entries make it smaller by themselves).
    mode, columnNameOfCorruptRecord
                    with a schema of your own: PERMISSIVE (default: a bad cast is null), DROPMALFORMED, FAILFAST.

Sink
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
                    one more place for the same rows, written in the same pass (``targets.py``): its url, its stream,
                    its cap... ``<name>`` is its sinkId. What is not said of it is as for the first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from millstream.broker import DEFAULT_LIMITS
from millstream.errors import InvalidArgument
from millstream.model import Durability, EntryId, TrimPolicy
from millstream.spark.connection import Address, address_from
from millstream.spark.errors import InvalidOption

Delivery = Literal["exactly_once", "exactly_once_by_event_id", "at_least_once"]
Content = Literal["auto", "fields", "value", "columns"]
Start = Literal["earliest", "latest"] | EntryId

ADDRESS: Final = (
    "url",
    "urlFile",
    "username",
    "passwordFile",
    "passwordEnv",
    "deadlineMs",
    "connectTimeoutMs",
    "answerTimeoutMs",
)
_BOTH: Final = (*ADDRESS, "valueField")
_SOURCE: Final = (
    *_BOTH,
    "subscribe",
    "subscribePattern",
    "startingOffsets",
    "startingTimestamp",
    "endingOffsets",
    "maxOffsetsPerTrigger",
    "minPartitions",
    "maxRecordsPerPartition",
    "splitStreams",
    "failOnDataLoss",
    "group",
    "pageSize",
    "mode",
    "columnNameOfCorruptRecord",
)
_SINK: Final = (
    *_BOTH,
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
_ALIASES: Final = {
    "stream.keys": "subscribe",
    "stream.offsets": "startingOffsets",
    "stream.group.name": "group",
    "stream.read.batch.size": "pageSize",
}
"""What users of the Scala connector wrote."""
_SPARKS_OWN: Final = frozenset({"checkpointlocation", "queryname", "outputmode", "path"})
"""Spark hands some of its own settings to the sink as well."""
_UNITS_MS: Final = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


@dataclass(frozen=True, slots=True)
class SourceOptions:
    address: Address
    streams: tuple[str, ...] = ()
    pattern: str | None = None
    value_field: str = "event"
    starting: Start | Mapping[str, Start] | None = None
    ending: Mapping[str, Start] | None = None
    max_rows: int | None = None
    min_partitions: int = 1
    rows_each: int = 250_000
    split_streams: bool = True
    fail_on_data_loss: bool = True
    group: str | None = None
    page_size: int = 5000
    mode: Literal["PERMISSIVE", "DROPMALFORMED", "FAILFAST"] = "PERMISSIVE"
    corrupt_column: str = "_corrupt_record"

    def reads(self, stream: str) -> bool:
        """Whether subscribe or subscribePattern asks for this stream."""
        return stream in self.streams if self.pattern is None else bool(re.fullmatch(self.pattern, stream))

    def start_of(self, stream: str, default: Literal["earliest", "latest"]) -> Start:
        if self.starting is None:
            return default
        return self.starting.get(stream, default) if isinstance(self.starting, Mapping) else self.starting


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


class _Given:
    """The options as they were given, by lower-cased name. Each reader below names the option it complains about."""

    def __init__(self, raw: Mapping[str, str], known: tuple[str, ...], ignored: frozenset[str]) -> None:
        names = {name.lower(): name for name in known}
        self._values: dict[str, str] = {}
        for given, value in raw.items():
            name = _ALIASES.get(given.lower(), given)
            if name.lower() in names:
                self._values[names[name.lower()]] = value
            elif given.lower() not in ignored:
                raise InvalidOption(given, "it", f"one of: {', '.join(sorted(known))}")

    def text(self, name: str) -> str | None:
        value = self._values.get(name)
        if value is not None and not value.strip():
            raise InvalidOption(name, value, "a text that is not empty, or leave it out")
        return value

    def number(self, name: str, default: int | None, *, least: int = 1) -> int | None:
        value = self.text(name)
        if value is None:
            return default
        if not re.fullmatch(r"[0-9]{1,18}", value.strip()) or int(value) < least:
            raise InvalidOption(name, value, f"a whole number of {least} or more")
        return int(value)

    def whole(self, name: str, default: int, *, least: int = 1) -> int:
        number = self.number(name, default, least=least)
        return default if number is None else number

    def choice(self, name: str, default: str, allowed: tuple[str, ...]) -> str:
        value = self.text(name) or default
        for each in allowed:
            if value.lower() == each.lower():
                return each
        raise InvalidOption(name, value, ", ".join(allowed))

    def duration_ms(self, name: str, default: int) -> int:
        value = self.text(name)
        if value is None:
            return default
        match = re.fullmatch(r"\s*([0-9]{1,12})\s*(ms|s|m|h|d)?[a-z]*\s*", value.lower().replace("min", "m"))
        if match is None or int(match[1]) == 0:
            raise InvalidOption(name, value, "a duration such as 90s, 30m, 24h or 7d; a bare number is milliseconds")
        return int(match[1]) * _UNITS_MS[match[2] or "ms"]


def source_options(raw: Mapping[str, str], *, streaming: bool) -> SourceOptions:
    """Reads the source's options; an InvalidOption names the first that is wrong."""
    given = _Given(raw, _SOURCE, frozenset())
    subscribe, pattern = given.text("subscribe"), given.text("subscribePattern")
    if (subscribe is None) == (pattern is None):
        raise InvalidOption("subscribe", subscribe, "exactly one of subscribe and subscribePattern")
    if streaming and given.text("endingOffsets") is not None:
        raise InvalidOption("endingOffsets", given.text("endingOffsets"), "it in batch reads only (spark.read)")
    if not streaming and given.text("maxOffsetsPerTrigger") is not None:
        value = given.text("maxOffsetsPerTrigger")
        raise InvalidOption("maxOffsetsPerTrigger", value, "it in streaming reads only (spark.readStream)")
    ending = given.text("endingOffsets")
    names, starting = _stream_names(subscribe), _starting(given)
    ends = None if ending is None or ending == "latest" else _per_stream("endingOffsets", ending, ("latest",))
    for option, places in (("startingOffsets", starting), ("endingOffsets", ends)):
        if isinstance(places, Mapping) and names and (strange := set(places) - set(names)):
            raise InvalidOption(option, sorted(strange), "streams that subscribe names")
    return SourceOptions(
        address=_address(given),
        streams=names,
        pattern=_pattern(pattern),
        value_field=given.text("valueField") or "event",
        starting=starting,
        ending=ends,
        max_rows=given.number("maxOffsetsPerTrigger", None),
        min_partitions=given.whole("minPartitions", 1),
        rows_each=given.whole("maxRecordsPerPartition", 250_000),
        split_streams=given.choice("splitStreams", "true", ("true", "false")) == "true",
        fail_on_data_loss=given.choice("failOnDataLoss", "true", ("true", "false")) == "true",
        group=given.text("group"),
        page_size=given.whole("pageSize", 5000),
        mode=given.choice("mode", "PERMISSIVE", ("PERMISSIVE", "DROPMALFORMED", "FAILFAST")),  # type: ignore[arg-type]  # choice gives one of these
        corrupt_column=given.text("columnNameOfCorruptRecord") or "_corrupt_record",
    )


def sink_options(raw: Mapping[str, str], *, streaming: bool) -> SinkOptions:
    """Reads the sink's options; an InvalidOption names the first that is wrong."""
    given = _Given(raw, _SINK, _SPARKS_OWN)
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
        address=_address(given),
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


def _address(given: _Given) -> Address:
    return address_from(
        given.text("url"),
        url_file=given.text("urlFile"),
        username=given.text("username"),
        password_file=given.text("passwordFile"),
        password_env=given.text("passwordEnv"),
        deadline_ms=given.whole("deadlineMs", 60_000),
        connect_ms=given.whole("connectTimeoutMs", DEFAULT_LIMITS.connect_ms),
        answer_ms=given.whole("answerTimeoutMs", DEFAULT_LIMITS.answer_ms),
    )


def _stream_names(subscribe: str | None) -> tuple[str, ...]:
    if subscribe is None:
        return ()
    names = [name.strip() for name in subscribe.split(",")]
    if not all(names):
        raise InvalidOption("subscribe", subscribe, "names of streams, separated by commas")
    return tuple(dict.fromkeys(names))


def _pattern(text: str | None) -> str | None:
    if text is not None:
        try:
            re.compile(text)
        except re.error as error:
            raise InvalidOption("subscribePattern", text, f"a regular expression ({error})") from None
    return text


def _starting(given: _Given) -> Start | Mapping[str, Start] | None:
    offsets = given.text("startingOffsets")
    timestamp = given.number("startingTimestamp", None, least=0)
    if timestamp is not None:
        if offsets is not None:
            raise InvalidOption("startingTimestamp", timestamp, "only one of startingTimestamp and startingOffsets")
        return EntryId(timestamp, 0).previous() if timestamp else "earliest"
    if offsets in (None, "earliest", "latest"):
        return offsets  # type: ignore[return-value]  # mypy does not narrow the text to the two words
    return _per_stream("startingOffsets", str(offsets), ("earliest", "latest"))


def _per_stream(option: str, text: str, words: tuple[str, ...]) -> Mapping[str, Start]:
    allowed = f'{", ".join(words)}, or JSON such as {{"orders": "1526919030474-55"}}'
    try:
        raw = json.loads(text)
    except ValueError:
        raise InvalidOption(option, text, allowed) from None
    if isinstance(raw, dict) and set(raw) == {"offsets"} and isinstance(raw["offsets"], dict):
        # The Scala connector's form: {"offsets": {"orders": {"groupName": "g", "offset": "1-1"}}}.
        raw = {name: each.get("offset") if isinstance(each, dict) else each for name, each in raw["offsets"].items()}
    if not isinstance(raw, dict) or not raw or not all(isinstance(value, str) for value in raw.values()):
        raise InvalidOption(option, text, allowed)
    return {name: _one_start(option, value, words, allowed) for name, value in raw.items()}


def _one_start(option: str, value: str, words: tuple[str, ...], allowed: str) -> Start:
    if value in words:
        return value  # type: ignore[return-value]  # one of the words that Start lists
    try:
        return EntryId.parse(value)
    except InvalidArgument:
        raise InvalidOption(option, value, allowed) from None


def _trim(given: _Given) -> TrimPolicy | None:
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
