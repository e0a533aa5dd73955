"""Converts and checks arguments of callers into command arguments, and replies into the values of ``model/``.

Replies have the types of RESP2, which all transports deliver.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from json import loads
from typing import Any, TypeVar

from millstream.broker.bulk import gc_paused
from millstream.broker.context import Limits
from millstream.errors import InvalidArgument, PayloadTooLarge
from millstream.model import Delivery, Entry, EntryId, TrimPolicy
from millstream.wire import ErrorReply, to_name

S = TypeVar("S")
T = TypeVar("T")
Name = str | bytes
"""The name of a stream, a group or a consumer."""
Value = bytes | str | int | float
Fields = Mapping[str, Value] | Mapping[bytes, Value] | Mapping[str | bytes, Value]
"""The fields of an entry, in order."""
Id = EntryId | str | bytes

JSON_HINT = "bytes, str, int or float; for nested values pass to_json_fields(fields)"
UNICODE_HINT = "text without lone surrogates, which cannot be encoded"
ID_HINT = "an EntryId, or a text such as 1526919030474-55"
MAX_COUNT = 2**53 - 1
"""The maximum of counts and milliseconds: exact in a Lua number, and far from an overflow in the server."""


def name_arg(name: Name, argument: str) -> bytes:
    """Encodes a name. An empty name is rejected, because it is always a mistake."""
    if isinstance(name, str):
        try:
            arg = name.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise InvalidArgument(argument, name, UNICODE_HINT) from None
    elif isinstance(name, bytes):
        arg = name
    else:
        raise InvalidArgument(argument, name, "a name as str or bytes")
    if not arg:
        raise InvalidArgument(argument, name, "a name that is not empty")
    return arg


def field_args(fields: Fields, limits: Limits) -> list[bytes]:
    """Names and values in turn."""
    return add_fields([], fields, limits.max_entry_bytes)


def add_fields(args: list[bytes], fields: Fields, max_bytes: int) -> list[bytes]:
    """Appends names and values in turn to ``args``. Every write uses it, so common types are tested first."""
    before = len(args)
    size = 0
    try:
        for name, value in fields.items():
            if type(name) is bytes:
                field = name
            else:
                field = name.encode() if type(name) is str and name.isascii() else _field_name(name)
            arg = value if type(value) is bytes else field_value_arg(field, value)
            args += (field, arg)
            size += len(field) + len(arg)
    except AttributeError:
        raise InvalidArgument("fields", fields, "a mapping from field names to values") from None
    if len(args) == before:
        raise InvalidArgument("fields", fields, "at least one field")
    if size > max_bytes:
        raise PayloadTooLarge("fields", size, max_bytes)
    return args


def _field_name(name: object) -> bytes:
    if isinstance(name, str):
        try:
            return name.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise InvalidArgument("fields", name, UNICODE_HINT) from None
    if isinstance(name, bytes):
        return bytes(name)
    raise InvalidArgument("fields", name, "field names of type str or bytes")


def field_value_arg(field: bytes, value: object) -> bytes:
    """Encodes the value of a field; an error names the field."""
    try:
        return value_arg(value, "")
    except InvalidArgument as error:
        raise InvalidArgument(f"fields[{field.decode(errors='replace')!r}]", value, error.allowed) from None


def value_arg(value: object, argument: str) -> bytes:
    """Encodes a value: str, bytes, int or float."""
    if isinstance(value, str):
        try:
            return value.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise InvalidArgument(argument, value, UNICODE_HINT) from None
    if isinstance(value, bytes):
        return bytes(value)
    if isinstance(value, bool):
        raise InvalidArgument(argument, value, JSON_HINT)
    if isinstance(value, int):
        try:
            return b"%d" % value
        except ValueError:
            raise InvalidArgument(argument, value, "a number of fewer digits, or its text") from None
    if isinstance(value, float):
        return float.__repr__(value).encode()
    raise InvalidArgument(argument, value, JSON_HINT)


def id_arg(value: Id, argument: str = "id") -> bytes:
    """Encodes a complete id; ``ms`` alone means ``ms-0``."""
    if isinstance(value, (str, bytes)):
        return b"%d-%d" % EntryId.parse(value, argument=argument)
    if isinstance(value, EntryId) and value.is_possible():
        return b"%d-%d" % value
    raise InvalidArgument(argument, value, ID_HINT)


def id_args(ids: Iterable[Id] | Id, argument: str = "ids") -> tuple[bytes, ...]:
    """Encodes several ids; a single id is a list of one."""
    if isinstance(ids, (EntryId, str, bytes)):
        return (id_arg(ids, argument),)
    return entry_id_args(sequence(ids, argument, "ids"), argument)


def entry_id_args(ids: Sequence[Id], argument: str = "ids") -> tuple[bytes, ...]:
    """Encodes many ids, without a range check of each EntryId: acknowledging is a hot path, and the server
    checks too.
    """
    try:
        return tuple([b"%d-%d" % id if type(id) is EntryId else id_arg(id, argument) for id in ids])
    except (TypeError, ValueError):
        return tuple([id_arg(id, argument) for id in sequence(ids, argument, "ids")])


def pattern_args(value: Name | Iterable[Name]) -> list[bytes]:
    """Encodes globs of channels; a single one is a list of one."""
    patterns = [value] if isinstance(value, (str, bytes)) else sequence(value, "patterns", "patterns")
    return [name_arg(pattern, "patterns") for pattern in patterns]


def sequence(values: Iterable[T], argument: str, items: str) -> Sequence[T]:
    """The items of an argument as a sequence. A str is rejected, because its items would be characters."""
    if isinstance(values, (list, tuple)):
        return values
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes, bytearray)):
        raise InvalidArgument(argument, values, f"a list of {items}")
    return list(values)


def pairs(values: Iterable[tuple[S, T]], argument: str, items: str) -> Sequence[tuple[S, T]]:
    """The items of an argument, each checked to be a pair."""
    checked = sequence(values, argument, items)
    for item in checked:
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise InvalidArgument(argument, item, items)
    return checked


def new_id_arg(value: Id) -> bytes:
    """An id for XADD: ``*``, ``ms-*`` or a complete id."""
    if isinstance(value, (str, bytes)):
        raw = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
        if raw == b"*":
            return raw
        if raw.endswith(b"-*") and raw[:-2].isdigit():
            return b"%d-*" % EntryId.parse(raw[:-2], argument="id").ms
    elif isinstance(value, EntryId):
        return id_arg(value)
    try:
        return id_arg(value)
    except InvalidArgument:
        raise InvalidArgument("id", value, "'*', 'ms-*' or an id such as 1526919030474-55") from None


def bound_arg(value: Id, argument: str) -> bytes:
    """An end of a range: ``-``, ``+``, an id, or an id without its sequence; the latter two may have the prefix
    ``(``.
    """
    if isinstance(value, EntryId):
        return id_arg(value, argument)
    raw = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
    if raw in (b"-", b"+"):
        return raw
    try:
        EntryId.parse(raw.removeprefix(b"("))
    except (AttributeError, InvalidArgument):
        raise InvalidArgument(argument, value, "'-', '+' or an id, with the prefix '(' to exclude it") from None
    return raw


def position_arg(value: Id, argument: str) -> bytes:
    """Where a reader starts: after an id, or at the end (``$``)."""
    if isinstance(value, (str, bytes)) and value in ("$", b"$"):
        return b"$"
    try:
        return id_arg(value, argument)
    except InvalidArgument:
        raise InvalidArgument(argument, value, "'0' (everything), '$' (from now on) or an id") from None


def count_arg(count: int, argument: str = "count", *, least: int = 1, greatest: int = MAX_COUNT) -> bytes:
    """Encodes an integer after checking its range."""
    if type(count) is not int or not least <= count <= greatest:
        raise InvalidArgument(argument, count, f"a whole number from {least} to {greatest}")
    return b"%d" % count


def counter_arg(number: int, argument: str) -> bytes:
    """Encodes a counter of a stream or group, which may have 64 bits."""
    return count_arg(number, argument, least=0, greatest=2**63 - 1)


def trim_args(trim: TrimPolicy | None) -> tuple[bytes, ...]:
    if trim is None:
        return ()
    if not isinstance(trim, TrimPolicy):
        raise InvalidArgument("trim", trim, "a TrimPolicy such as TrimPolicy(max_len=1000)")
    return trim.args()


def entries_read_args(entries_read: int | None) -> tuple[bytes, ...]:
    if entries_read is None:
        return ()
    return (b"ENTRIESREAD", counter_arg(entries_read, "entries_read"))


def block_args(block_ms: int | None) -> tuple[bytes, ...]:
    if block_ms is None:
        return ()
    if type(block_ms) is not int or not 0 <= block_ms <= MAX_COUNT:
        raise InvalidArgument("block_ms", block_ms, "None (do not wait), 0 (no time limit) or a number of milliseconds")
    return (b"BLOCK", b"%d" % block_ms)


# --- replies ----------------------------------------------------------------------------------------------------------

_new = tuple.__new__

MIN_IDS_AS_JSON = 12
"""From this number of ids on, parsing them as one JSON array is faster than parsing each."""
GC_PAUSE_MIN_IDS = 500
"""From this number of ids on, the garbage collector is paused while they are created; it would run every 700
objects.
"""


def entry_id(raw: bytes) -> EntryId:
    """Parses an id of a reply; its form needs no check."""
    ms, _, seq = raw.partition(b"-")
    return _new(EntryId, (int(ms), int(seq)))


def entry_ids(raws: Sequence[bytes]) -> list[EntryId]:
    """Parses ids; many at once as one JSON array, whose numbers are parsed in C."""
    if len(raws) < MIN_IDS_AS_JSON:
        return [entry_id(raw) for raw in raws]
    numbers = iter(loads(b"[%b]" % b",".join(raws).replace(b"-", b",")))
    made = map(_new, repeat(EntryId), zip(numbers, numbers, strict=True))
    if len(raws) < GC_PAUSE_MIN_IDS:
        return list(made)
    with gc_paused():
        return list(made)


def ids_or_errors(replies: list[Any]) -> list[Any]:
    """Parses XADD's replies: ids; error replies stay as they are."""
    try:
        return entry_ids(replies)
    except (TypeError, AttributeError):  # an ErrorReply is neither joined nor parsed
        return [reply if isinstance(reply, ErrorReply) else entry_id(reply) for reply in replies]


def entries(reply: Any) -> list[Entry]:
    return list(map(_new, repeat(Entry), zip(entry_ids([raw for raw, _ in reply]), _all_fields(reply), strict=True)))


def deliveries(reply: Any) -> list[Delivery]:
    """Parses entries of XREADGROUP. A deleted entry in a consumer's history has no fields: None."""
    ids = entry_ids([raw for raw, _ in reply])
    return list(map(_new, repeat(Delivery), zip(ids, _all_fields(reply), repeat(None))))


def counted_deliveries(reply: Any) -> list[Delivery]:
    """Parses entries of this package's scripts, which also return the delivery count."""
    ids = entry_ids([raw for raw, _, _ in reply])
    fields = _all_fields([(raw, flat) for raw, flat, _ in reply])
    return list(map(_new, repeat(Delivery), zip(ids, fields, [times for _, _, times in reply], strict=True)))


def _all_fields(reply: Any) -> list[dict[bytes, bytes] | None]:
    width = len(reply[0][1] or ()) if reply else 0
    try:
        if width == 2:  # one field each: the most common and fastest case
            return [{name: value} for _, (name, value) in reply]
        if width == 4:  # two fields: messages of the default codec
            return [{a: b, c: d} for _, (a, b, c, d) in reply]
    except (TypeError, ValueError):
        pass
    return [mapping(flat) if flat else None for _, flat in reply]


def by_stream(reply: Any) -> list[tuple[str, Any]]:
    """Parses XREAD and XREADGROUP: pairs of a stream and its items; the reply is null if there are none."""
    return [(to_name(name), items) for name, items in reply] if reply else []


def mapping(flat: Any) -> dict[bytes, Any]:
    """A dict from keys and values in turn."""
    return dict(zip(flat[::2], flat[1::2], strict=True))
