"""What callers pass in, checked and turned into the words of a command; what servers answer, turned into values.

The values are those of ``model/``. Answers come in RESP2's shapes, which both links deliver.
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
"""A stream's, a group's or a consumer's name."""
Value = bytes | str | int | float
Fields = Mapping[str, Value] | Mapping[bytes, Value] | Mapping[str | bytes, Value]
"""An entry's fields, in order."""
Id = EntryId | str | bytes

JSON_HINT = "bytes, str, int or float; for anything richer encode it first, for instance with the json codec"
UNICODE_HINT = "text without halves of characters (lone surrogates), which have no encoding"
ID_HINT = "an EntryId, or a text such as 1526919030474-55"
GREATEST = 2**53 - 1
"""Counts and milliseconds: as many as a script's numbers hold, and far from where a server's sums overflow."""


def name_word(name: Name, argument: str) -> bytes:
    """A name as it travels. The empty name is refused: it is always a mistake of the caller."""
    if isinstance(name, str):
        try:
            word = name.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise InvalidArgument(argument, name, UNICODE_HINT) from None
    elif isinstance(name, bytes):
        word = name
    else:
        raise InvalidArgument(argument, name, "a name as str or bytes")
    if not word:
        raise InvalidArgument(argument, name, "a name that is not empty")
    return word


def field_words(fields: Fields, limits: Limits) -> list[bytes]:
    """Names and values in turn."""
    return add_fields([], fields, limits.max_entry_bytes)


def add_fields(words: list[bytes], fields: Fields, most: int) -> list[bytes]:
    """``words`` with names and values in turn at its end. Every write comes through here, so plain ones are quick."""
    before = len(words)
    size = 0
    try:
        for name, value in fields.items():
            if type(name) is bytes:
                field = name
            else:
                field = name.encode() if type(name) is str and name.isascii() else _field_name(name)
            word = value if type(value) is bytes else field_value(field, value)
            words += (field, word)
            size += len(field) + len(word)
    except AttributeError:
        raise InvalidArgument("fields", fields, "a mapping from field names to values") from None
    if len(words) == before:
        raise InvalidArgument("fields", fields, "at least one field")
    if size > most:
        raise PayloadTooLarge("fields", size, most)
    return words


def _field_name(name: object) -> bytes:
    if isinstance(name, str):
        try:
            return name.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise InvalidArgument("fields", name, UNICODE_HINT) from None
    if isinstance(name, bytes):
        return bytes(name)
    raise InvalidArgument("fields", name, "field names of type str or bytes")


def field_value(field: bytes, value: object) -> bytes:
    try:
        return value_word(value, "")
    except InvalidArgument as error:
        raise InvalidArgument(f"fields[{field.decode(errors='replace')!r}]", value, error.allowed) from None


def value_word(value: object, argument: str) -> bytes:
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


def id_word(given: Id, argument: str = "id") -> bytes:
    """A complete id; ``ms`` alone means ``ms-0``."""
    if isinstance(given, (str, bytes)):
        return b"%d-%d" % EntryId.parse(given, argument=argument)
    if isinstance(given, EntryId) and given.is_possible():
        return b"%d-%d" % given
    raise InvalidArgument(argument, given, ID_HINT)


def id_words(ids: Iterable[Id] | Id, argument: str = "ids") -> tuple[bytes, ...]:
    """Several ids; a single one is taken as a list of one."""
    if isinstance(ids, (EntryId, str, bytes)):
        return (id_word(ids, argument),)
    return entry_words(sequence(ids, argument, "ids"), argument)


def entry_words(ids: Sequence[Id], argument: str = "ids") -> tuple[bytes, ...]:
    """Many ids. Acknowledging is a hot path: an EntryId out of range is left to the server, which refuses it too."""
    try:
        return tuple([b"%d-%d" % one if type(one) is EntryId else id_word(one, argument) for one in ids])
    except (TypeError, ValueError):
        return tuple([id_word(one, argument) for one in sequence(ids, argument, "ids")])


def pattern_words(given: Name | Iterable[Name]) -> list[bytes]:
    """Globs of channels; a single one is taken as a list of one."""
    many = [given] if isinstance(given, (str, bytes)) else sequence(given, "patterns", "patterns")
    return [name_word(one, "patterns") for one in many]


def sequence(given: Iterable[T], argument: str, what: str) -> Sequence[T]:
    """Several of something. A text is refused: it would be taken apart into letters."""
    if isinstance(given, (list, tuple)):
        return given
    if not isinstance(given, Iterable) or isinstance(given, (str, bytes, bytearray)):
        raise InvalidArgument(argument, given, f"a list of {what}")
    return list(given)


def pairs(given: Iterable[tuple[S, T]], argument: str, what: str) -> Sequence[tuple[S, T]]:
    many = sequence(given, argument, what)
    for one in many:
        if not isinstance(one, (tuple, list)) or len(one) != 2:
            raise InvalidArgument(argument, one, what)
    return many


def new_id_word(given: Id) -> bytes:
    """What XADD takes: ``*``, ``ms-*`` or a complete id."""
    if isinstance(given, (str, bytes)):
        raw = given.encode("utf-8", "surrogatepass") if isinstance(given, str) else given
        if raw == b"*":
            return raw
        if raw.endswith(b"-*") and raw[:-2].isdigit():
            return b"%d-*" % EntryId.parse(raw[:-2], argument="id").ms
    elif isinstance(given, EntryId):
        return id_word(given)
    try:
        return id_word(given)
    except InvalidArgument:
        raise InvalidArgument("id", given, "'*', 'ms-*' or an id such as 1526919030474-55") from None


def bound_word(given: Id, argument: str) -> bytes:
    """A range's end: ``-``, ``+``, an id, an id without its sequence, any of the latter after ``(``."""
    if isinstance(given, EntryId):
        return id_word(given, argument)
    raw = given.encode("utf-8", "surrogatepass") if isinstance(given, str) else given
    if raw in (b"-", b"+"):
        return raw
    try:
        EntryId.parse(raw.removeprefix(b"("))
    except (AttributeError, InvalidArgument):
        raise InvalidArgument(argument, given, "'-', '+' or an id, '(' before it to exclude it") from None
    return raw


def position_word(given: Id, argument: str) -> bytes:
    """Where a reader starts: after an id, or at the end (``$``)."""
    if isinstance(given, (str, bytes)) and given in ("$", b"$"):
        return b"$"
    try:
        return id_word(given, argument)
    except InvalidArgument:
        raise InvalidArgument(argument, given, "'0' (everything), '$' (from now on) or an id") from None


def count_word(count: int, argument: str = "count", *, least: int = 1, most: int = GREATEST) -> bytes:
    if type(count) is not int or not least <= count <= most:
        raise InvalidArgument(argument, count, f"a whole number from {least} to {most}")
    return b"%d" % count


def counter_word(number: int, argument: str) -> bytes:
    """What a stream or a group has counted over its life."""
    return count_word(number, argument, least=0, most=2**63 - 1)


def trim_words(trim: TrimPolicy | None) -> tuple[bytes, ...]:
    if trim is None:
        return ()
    if not isinstance(trim, TrimPolicy):
        raise InvalidArgument("trim", trim, "a TrimPolicy such as TrimPolicy(max_len=1000)")
    return trim.words()


def read_words(entries_read: int | None) -> tuple[bytes, ...]:
    if entries_read is None:
        return ()
    return (b"ENTRIESREAD", counter_word(entries_read, "entries_read"))


def block_words(block_ms: int | None) -> tuple[bytes, ...]:
    if block_ms is None:
        return ()
    if type(block_ms) is not int or not 0 <= block_ms <= GREATEST:
        raise InvalidArgument("block_ms", block_ms, "None (do not wait), 0 (for ever) or a number of milliseconds")
    return (b"BLOCK", b"%d" % block_ms)


# --- what servers answer ----------------------------------------------------------------------------------------------

_new = tuple.__new__

MANY = 500
"""Ids that Python's collector would search for garbage while they are made, about once for every 700 objects."""


def entry_id(raw: bytes) -> EntryId:
    """An id that a server wrote: no need to doubt its form."""
    ms, _, seq = raw.partition(b"-")
    return _new(EntryId, (int(ms), int(seq)))


def entry_ids(raws: Sequence[bytes]) -> list[EntryId]:
    """Many of them, without a step of Python for each: as one JSON array, whose numbers are read in C."""
    numbers = iter(loads(b"[%b]" % b",".join(raws).replace(b"-", b",")))
    made = map(_new, repeat(EntryId), zip(numbers, numbers, strict=True))
    if len(raws) < MANY:
        return list(made)
    with gc_paused():
        return list(made)


def ids_or_errors(replies: list[Any]) -> list[Any]:
    """XADD's replies: ids, and error replies as they are."""
    try:
        return entry_ids(replies)
    except TypeError:
        return [reply if isinstance(reply, ErrorReply) else entry_id(reply) for reply in replies]


def entries(reply: Any) -> list[Entry]:
    return list(map(_new, repeat(Entry), zip(entry_ids([raw for raw, _ in reply]), _all_fields(reply), strict=True)))


def deliveries(reply: Any) -> list[Delivery]:
    """A deleted entry of one's own history has no fields: None."""
    ids = entry_ids([raw for raw, _ in reply])
    return list(map(_new, repeat(Delivery), zip(ids, _all_fields(reply), repeat(None))))


def counted_deliveries(reply: Any) -> list[Delivery]:
    """Those of our steps, which tell how often each was delivered."""
    ids = entry_ids([raw for raw, _, _ in reply])
    fields = _all_fields([(raw, words) for raw, words, _ in reply])
    return list(map(_new, repeat(Delivery), zip(ids, fields, [times for _, _, times in reply], strict=True)))


def _all_fields(reply: Any) -> list[dict[bytes, bytes] | None]:
    try:
        return [{name: value} for _, (name, value) in reply]  # one field each: the most common shape, and the quickest
    except (TypeError, ValueError):
        pass
    try:
        return [{a: b, c: d} for _, (a, b, c, d) in reply]  # two fields: a message of the default codec
    except (TypeError, ValueError):
        return [mapping(flat) if flat else None for _, flat in reply]


def by_stream(reply: Any) -> list[tuple[str, Any]]:
    """XREAD's and XREADGROUP's shape: pairs of a stream and its items; a null when there was nothing."""
    return [(to_name(name), items) for name, items in reply] if reply else []


def mapping(flat: Any) -> dict[bytes, Any]:
    """Keys and values in turn."""
    return dict(zip(flat[::2], flat[1::2], strict=True))
