"""Options of the source, and those that source and sink share, parsed from Spark's text options. No I/O.

The sink's options are in ``sink_options``. Names follow Spark's Kafka source and are case-insensitive. An unknown name
is an error, so that a misspelled option is not ignored.

Both sides
    url             redis://, rediss://, unix://, redis+sentinel:// or redis+cluster:// (with TLS rediss+...);
                    ``${NAME}`` in it is replaced from the environment of each process that connects.
                    Default: ``${MILLSTREAM_URL}``.
    urlFile         instead of ``url``: a file that contains it, read by each process that connects.
    username, passwordFile, passwordEnv
                    the user, and the file or environment variable that contains the password. Each process that
                    connects reads it, so no plan, checkpoint or log contains a secret.
    deadlineMs      how long a task retries while the server does not reply (default 60000).
    connectTimeoutMs, answerTimeoutMs
                    within the deadline: the limit for opening one connection, and for the reply to a command before
                    the connection is replaced (default 5000 each).
    valueField      the field that becomes the column ``value`` (default ``event``).

Source
    subscribe       names of streams, separated by commas; or
    subscribePattern  a regular expression that must match a stream's whole name. Exactly one of the two is required.
    startingOffsets earliest, latest, or JSON such as {"orders": "1526919030474-55", "other": "earliest"}: reading
                    starts AFTER the id, as with XREAD. Streaming defaults to latest, batch to earliest. A restarted
                    query continues from its checkpoint instead.
    startingTimestamp  milliseconds since 1970: reading starts with the first entry of that time or later.
    endingOffsets   batch only: latest (default), or JSON per stream; the id is included.
    maxOffsetsPerTrigger  maximum number of rows in one micro-batch, over all streams.
    minPartitions, maxRecordsPerPartition (default 250000)
                    a batch is split into enough partitions for both.
    splitStreams    true (default). false: no stream is split within a batch, so that its entries are read and written
                    in order. There are then at most as many partitions as streams.
    failOnDataLoss  true (default): entries that were trimmed, or possibly trimmed, before they were read are an error.
                    false: they are logged and counted.
    durability      memory (default): reads every entry of the primary. replicated(n): reads only entries that n
                    replicas have, so that a failover does not remove entries that were read. n must be the number of
                    all replicas, as for writes.
    group           publishes progress as the position of this consumer group, which lag tools and safe trimming use.
    pageSize        maximum number of entries in one XRANGE (default 5000; smaller if entries are large).
    maxEntryBytes   an entry with more bytes (names and values) is replaced by one field, ``millstream.oversize``,
                    which contains its size, so that it cannot exhaust the memory of the JVM (default: no limit). If
                    this option is set, an entry with repeated field names has one more field,
                    ``millstream.repeated``, which lists those names.
    pushFilters     batch only: true reads only the entries that filters select, if Spark pushes filters (``filters``).
                    Default false, because Spark up to 4.3 applies the filters of one query to other queries of the same
                    loaded DataFrame: load a DataFrame for each query.
    mode, columnNameOfCorruptRecord
                    with a user's schema: PERMISSIVE (default: a failed cast gives null), DROPMALFORMED, FAILFAST.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from millstream.broker.context import DEFAULT_LIMITS
from millstream.errors import InvalidArgument
from millstream.model import Durability, EntryId, parse_duration_ms
from millstream.spark.connection import Address, address_from
from millstream.spark.errors import InvalidOption

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
BOTH_SIDES: Final = (*ADDRESS, "valueField")
SOURCE_OPTIONS: Final = (
    *BOTH_SIDES,
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
    "durability",
    "group",
    "pageSize",
    "maxEntryBytes",
    "pushFilters",
    "mode",
    "columnNameOfCorruptRecord",
)
_ALIASES: Final = {
    "stream.keys": "subscribe",
    "stream.offsets": "startingOffsets",
    "stream.group.name": "group",
    "stream.read.batch.size": "pageSize",
}
"""Option names of the Scala connector."""


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
    durability: Durability | None = None
    group: str | None = None
    page_size: int = 5000
    max_entry_bytes: int | None = None
    push_filters: bool = False
    mode: Literal["PERMISSIVE", "DROPMALFORMED", "FAILFAST"] = "PERMISSIVE"
    corrupt_column: str = "_corrupt_record"

    def reads(self, stream: str) -> bool:
        """Whether subscribe or subscribePattern includes this stream."""
        return stream in self.streams if self.pattern is None else bool(re.fullmatch(self.pattern, stream))

    def start_of(self, stream: str, default: Literal["earliest", "latest"]) -> Start:
        if self.starting is None:
            return default
        return self.starting.get(stream, default) if isinstance(self.starting, Mapping) else self.starting


class GivenOptions:
    """Spark's text options by name. Each method parses one option; its error names the option."""

    def __init__(self, raw: Mapping[str, str], allowed: tuple[str, ...], ignored: frozenset[str]) -> None:
        names = {name.lower(): name for name in allowed}
        self._values: dict[str, str] = {}
        for key, value in raw.items():
            name = _ALIASES.get(key.lower(), key)
            if name.lower() in names:
                self._values[names[name.lower()]] = value
            elif key.lower() not in ignored:
                raise InvalidOption(key, "it", f"one of: {', '.join(sorted(allowed))}")

    def text(self, name: str) -> str | None:
        value = self._values.get(name)
        if value is not None and not value.strip():
            raise InvalidOption(name, value, "a text that is not empty; or omit the option")
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
        for name_allowed in allowed:
            if value.lower() == name_allowed.lower():
                return name_allowed
        raise InvalidOption(name, value, ", ".join(allowed))

    def duration_ms(self, name: str, default: int) -> int:
        value = self.text(name)
        if value is None:
            return default
        try:
            milliseconds = parse_duration_ms(value, name)
        except InvalidArgument as error:
            raise InvalidOption(name, value, error.allowed) from None
        if milliseconds == 0:
            raise InvalidOption(name, value, "a length of time above 0, such as 30m, 24h or 7d")
        return milliseconds


def source_options(raw: Mapping[str, str], *, streaming: bool) -> SourceOptions:
    """Parses the source's options. Raises InvalidOption for the first option that is not valid."""
    options = GivenOptions(raw, SOURCE_OPTIONS, frozenset())
    subscribe, pattern = options.text("subscribe"), options.text("subscribePattern")
    if (subscribe is None) == (pattern is None):
        raise InvalidOption("subscribe", subscribe, "exactly one of subscribe and subscribePattern")
    if streaming and options.text("endingOffsets") is not None:
        raise InvalidOption("endingOffsets", options.text("endingOffsets"), "it in batch reads only (spark.read)")
    if streaming and options.text("pushFilters") is not None:
        raise InvalidOption("pushFilters", options.text("pushFilters"), "it in batch reads only (spark.read)")
    if not streaming and options.text("maxOffsetsPerTrigger") is not None:
        value = options.text("maxOffsetsPerTrigger")
        raise InvalidOption("maxOffsetsPerTrigger", value, "it in streaming reads only (spark.readStream)")
    ending = options.text("endingOffsets")
    names, starting = _stream_names(subscribe), _starting(options)
    ends = None if ending is None or ending == "latest" else _per_stream("endingOffsets", ending, ("latest",))
    for option, positions in (("startingOffsets", starting), ("endingOffsets", ends)):
        if isinstance(positions, Mapping) and names and (unknown := set(positions) - set(names)):
            raise InvalidOption(option, sorted(unknown), "streams that subscribe names")
    return SourceOptions(
        address=address_of(options),
        streams=names,
        pattern=_pattern(pattern),
        value_field=options.text("valueField") or "event",
        starting=starting,
        ending=ends,
        max_rows=options.number("maxOffsetsPerTrigger", None),
        min_partitions=options.whole("minPartitions", 1),
        rows_each=options.whole("maxRecordsPerPartition", 250_000),
        split_streams=options.choice("splitStreams", "true", ("true", "false")) == "true",
        fail_on_data_loss=options.choice("failOnDataLoss", "true", ("true", "false")) == "true",
        durability=_replicas(options.text("durability")),
        group=options.text("group"),
        page_size=options.whole("pageSize", 5000),
        max_entry_bytes=options.number("maxEntryBytes", None),
        push_filters=options.choice("pushFilters", "false", ("true", "false")) == "true",
        mode=options.choice("mode", "PERMISSIVE", ("PERMISSIVE", "DROPMALFORMED", "FAILFAST")),  # type: ignore[arg-type]  # choice gives one of these
        corrupt_column=options.text("columnNameOfCorruptRecord") or "_corrupt_record",
    )


def address_of(options: GivenOptions) -> Address:
    return address_from(
        options.text("url"),
        url_file=options.text("urlFile"),
        username=options.text("username"),
        password_file=options.text("passwordFile"),
        password_env=options.text("passwordEnv"),
        deadline_ms=options.whole("deadlineMs", 60_000),
        connect_ms=options.whole("connectTimeoutMs", DEFAULT_LIMITS.connect_ms),
        answer_ms=options.whole("answerTimeoutMs", DEFAULT_LIMITS.answer_ms),
    )


def _replicas(text: str | None) -> Durability | None:
    if text in (None, "memory"):
        return None
    try:
        durability = Durability.parse(str(text))
    except InvalidArgument:
        durability = None
    if durability is None or durability.level != "replicated":
        raise InvalidOption("durability", text, "memory, or replicated(n)")
    return durability


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


def _starting(options: GivenOptions) -> Start | Mapping[str, Start] | None:
    offsets = options.text("startingOffsets")
    timestamp = options.number("startingTimestamp", None, least=0)
    if timestamp is not None:
        if offsets is not None:
            raise InvalidOption("startingTimestamp", timestamp, "only one of startingTimestamp and startingOffsets")
        return EntryId(timestamp, 0).previous() if timestamp else "earliest"
    if offsets in (None, "earliest", "latest"):
        return offsets  # type: ignore[return-value]  # mypy does not narrow the text to the two literals
    return _per_stream("startingOffsets", str(offsets), ("earliest", "latest"))


def _per_stream(option: str, text: str, keywords: tuple[str, ...]) -> Mapping[str, Start]:
    allowed = f'{", ".join(keywords)}, or JSON such as {{"orders": "1526919030474-55"}}'
    try:
        raw = json.loads(text)
    except ValueError:
        raise InvalidOption(option, text, allowed) from None
    if isinstance(raw, dict) and set(raw) == {"offsets"} and isinstance(raw["offsets"], dict):
        # The format of the Scala connector: {"offsets": {"orders": {"groupName": "g", "offset": "1-1"}}}.
        raw = {
            name: start.get("offset") if isinstance(start, dict) else start for name, start in raw["offsets"].items()
        }
    if not isinstance(raw, dict) or not raw or not all(isinstance(value, str) for value in raw.values()):
        raise InvalidOption(option, text, allowed)
    return {name: _parse_start(option, value, keywords, allowed) for name, value in raw.items()}


def _parse_start(option: str, value: str, keywords: tuple[str, ...], allowed: str) -> Start:
    if value in keywords:
        return value  # type: ignore[return-value]  # one of the literals of Start
    try:
        return EntryId.parse(value)
    except InvalidArgument:
        raise InvalidOption(option, value, allowed) from None
