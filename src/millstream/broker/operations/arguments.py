"""What callers pass in, checked and turned into the words of a command."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from millstream.broker.limits import Limits
from millstream.errors import InvalidArgument, PayloadTooLarge
from millstream.model.entry_id import EntryId

Name = str | bytes
"""A stream's, a group's or a consumer's name."""
Value = bytes | str | int | float
Fields = Mapping[str, Value] | Mapping[bytes, Value] | Mapping[str | bytes, Value]
"""An entry's fields, in order."""
Id = EntryId | str | bytes

JSON_HINT = "bytes, str, int or float; for anything richer encode it first, for instance with the json codec"
UNICODE_HINT = "text without halves of characters (lone surrogates), which have no encoding"


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
            field = name.encode() if type(name) is str and name.isascii() else _field_name(name)
            word = value if type(value) is bytes else value_word(field, value)
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


def value_word(field: bytes, value: object) -> bytes:
    if isinstance(value, str):
        try:
            return value.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise InvalidArgument(f"fields[{field.decode(errors='replace')!r}]", value, UNICODE_HINT) from None
    if isinstance(value, bytes):
        return bytes(value)
    if isinstance(value, bool):
        raise InvalidArgument(f"fields[{field.decode(errors='replace')!r}]", value, JSON_HINT)
    if isinstance(value, int):
        return b"%d" % value
    if isinstance(value, float):
        return float.__repr__(value).encode()
    raise InvalidArgument(f"fields[{field.decode(errors='replace')!r}]", value, JSON_HINT)


def id_word(given: Id, argument: str = "id") -> bytes:
    """A complete id; ``ms`` alone means ``ms-0``."""
    if type(given) is EntryId:
        return b"%d-%d" % given
    if isinstance(given, (str, bytes)):
        return b"%d-%d" % EntryId.parse(given, argument=argument)
    if isinstance(given, EntryId):
        return b"%d-%d" % given
    raise InvalidArgument(argument, given, "an EntryId, or a text such as 1526919030474-55")


def id_words(ids: Iterable[Id] | Id, argument: str = "ids") -> tuple[bytes, ...]:
    """Several ids; a single one is taken as a list of one."""
    if isinstance(ids, (EntryId, str, bytes)):
        return (id_word(ids, argument),)
    return tuple([b"%d-%d" % one if type(one) is EntryId else id_word(one, argument) for one in ids])


def new_id_word(given: Id) -> bytes:
    """What XADD takes: ``*``, ``ms-*`` or a complete id."""
    if given in ("*", b"*"):
        return b"*"
    if isinstance(given, EntryId):
        return b"%d-%d" % given
    if isinstance(given, (str, bytes)):
        raw = given.encode() if isinstance(given, str) else given
        if raw.endswith(b"-*"):
            return b"%d-*" % EntryId.parse(raw[:-2], argument="id").ms
        return id_word(raw)
    raise InvalidArgument("id", given, "'*', 'ms-*' or an id such as 1526919030474-55")


def bound_word(given: Id, argument: str) -> bytes:
    """A range's end: ``-``, ``+``, an id, an id without its sequence, any of the latter after ``(``."""
    if isinstance(given, EntryId):
        return b"%d-%d" % given
    raw = given.encode() if isinstance(given, str) else given
    if not isinstance(raw, bytes):
        raise InvalidArgument(argument, given, "'-', '+' or an id, '(' before it to exclude it")
    if raw in (b"-", b"+"):
        return raw
    EntryId.parse(raw.removeprefix(b"("), argument=argument)
    return raw


def count_word(count: int, argument: str = "count", *, least: int = 1) -> bytes:
    if type(count) is not int or count < least:
        raise InvalidArgument(argument, count, f"a whole number of {least} or more")
    return b"%d" % count


def block_words(block_ms: int | None) -> tuple[bytes, ...]:
    if block_ms is None:
        return ()
    if type(block_ms) is not int or block_ms < 0:
        raise InvalidArgument("block_ms", block_ms, "None (do not wait), 0 (for ever) or a number of milliseconds")
    return (b"BLOCK", b"%d" % block_ms)
