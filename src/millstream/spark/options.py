"""What a source may be asked for, read from Spark's text options into values; and what both sides share. Pure: nothing
connects here. The sink's options are in ``sink_options``.

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
    durability      memory (default): what the primary holds is read. replicated(n): only what n replicas hold too, so
                    that a failover takes nothing back that was read; n must be all replicas, as for writes.
    group           publishes progress as this consumer group's position, so that lag and safe trimming see the query.
    pageSize        entries in one XRANGE at most (default 5000; big entries make it smaller by themselves).
    mode, columnNameOfCorruptRecord
                    with a schema of your own: PERMISSIVE (default: a bad cast is null), DROPMALFORMED, FAILFAST.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from millstream.broker import DEFAULT_LIMITS
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
    "mode",
    "columnNameOfCorruptRecord",
)
_ALIASES: Final = {
    "stream.keys": "subscribe",
    "stream.offsets": "startingOffsets",
    "stream.group.name": "group",
    "stream.read.batch.size": "pageSize",
}
"""What users of the Scala connector wrote."""


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
    mode: Literal["PERMISSIVE", "DROPMALFORMED", "FAILFAST"] = "PERMISSIVE"
    corrupt_column: str = "_corrupt_record"

    def reads(self, stream: str) -> bool:
        """Whether subscribe or subscribePattern asks for this stream."""
        return stream in self.streams if self.pattern is None else bool(re.fullmatch(self.pattern, stream))

    def start_of(self, stream: str, default: Literal["earliest", "latest"]) -> Start:
        if self.starting is None:
            return default
        return self.starting.get(stream, default) if isinstance(self.starting, Mapping) else self.starting


class GivenOptions:
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
        try:
            found = parse_duration_ms(value, name)
        except InvalidArgument as error:
            raise InvalidOption(name, value, error.allowed) from None
        if found == 0:
            raise InvalidOption(name, value, "a length of time above 0, such as 30m, 24h or 7d")
        return found


def source_options(raw: Mapping[str, str], *, streaming: bool) -> SourceOptions:
    """Reads the source's options; an InvalidOption names the first that is wrong."""
    given = GivenOptions(raw, SOURCE_OPTIONS, frozenset())
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
        address=address_of(given),
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
        durability=_replicas(given.text("durability")),
        group=given.text("group"),
        page_size=given.whole("pageSize", 5000),
        mode=given.choice("mode", "PERMISSIVE", ("PERMISSIVE", "DROPMALFORMED", "FAILFAST")),  # type: ignore[arg-type]  # choice gives one of these
        corrupt_column=given.text("columnNameOfCorruptRecord") or "_corrupt_record",
    )


def address_of(given: GivenOptions) -> Address:
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


def _replicas(text: str | None) -> Durability | None:
    if text in (None, "memory"):
        return None
    try:
        wanted = Durability.parse(str(text))
    except InvalidArgument:
        wanted = None
    if wanted is None or wanted.level != "replicated":
        raise InvalidOption("durability", text, "memory, or replicated(n)")
    return wanted


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


def _starting(given: GivenOptions) -> Start | Mapping[str, Start] | None:
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
