"""The fields of ``before`` and ``after``: select, drop, rename, flatten, mask.

Fields are named by paths that start at the row (``address.city``), see ``paths``. Other fields keep every digit of
their numbers, and a row without a named field is passed on byte for byte. The value of a masked field appears in no
output and in no dead letter, even if the event failed before it reached the mask. ``conceal`` masks such events.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PrivateAttr, SecretStr, model_validator
from pydantic_core import PydanticCustomError

from millstream.pipelines import paths
from millstream.pipelines.events import MAX_ROW_BYTES, RowTooLarge, change_rows, fail_where, per_row
from millstream.pipelines.json_text import (
    JsonError,
    Number,
    canonical,
    has_duplicate_members,
    parse,
    template_text,
    write,
)
from millstream.pipelines.paths import FieldPath
from millstream.pipelines.processors.processor import Processor, ProcessorStage, RowPath
from millstream.pipelines.spec.part import NonEmpty, Secret, Text

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class Select(Processor):
    """Keeps only the named fields."""

    type: Literal["select"]
    renames = True
    fields: Annotated[list[RowPath], Field(min_length=1)]
    """The paths of the fields to keep, such as ``address.city``."""

    def apply(self, events: DataFrame, stage: ProcessorStage) -> DataFrame:
        named = [FieldPath.of_row(name) for name in self.fields]

        def selected(row: dict[str, Any]) -> bool:
            selection = paths.select(row, named)
            if selection == row:
                return False
            row.clear()
            row.update(selection)
            return True

        return change_rows(events, selected)

    def takes_away(self, path: FieldPath) -> str | None:
        named = [FieldPath.of_row(name) for name in self.fields]
        is_selected = any(path[: len(field)] == field or field[: len(path)] == path for field in named)
        return None if is_selected else "it is not among the fields that it selects"

    def before(self, path: FieldPath) -> FieldPath:
        return path


class Drop(Processor):
    """Drops the named fields."""

    type: Literal["drop"]
    renames = True
    fields: Annotated[list[RowPath], Field(min_length=1)]
    """The paths of the fields to remove."""

    def apply(self, events: DataFrame, stage: ProcessorStage) -> DataFrame:
        named = [FieldPath.of_row(name) for name in self.fields]
        return change_rows(events, lambda row: paths.drop(row, named), may_concern=paths.mentions(named))

    def takes_away(self, path: FieldPath) -> str | None:
        named = [FieldPath.of_row(name) for name in self.fields]
        return "it drops that field" if any(path[: len(field)] == field for field in named) else None

    def before(self, path: FieldPath) -> FieldPath:
        return path


class Rename(Processor):
    """Renames the last step of a field's path. A field that already has the new name is replaced."""

    type: Literal["rename"]
    renames = True
    fields: Annotated[dict[RowPath, NonEmpty], Field(min_length=1)]
    """The new last name of each field, by the path of the field."""

    @model_validator(mode="after")
    def _checked(self) -> Rename:
        new = [(FieldPath.of_row(old)[:-1], self._last(old, name)) for old, name in self.fields.items()]
        if len(set(new)) < len(new):
            raise PydanticCustomError("rename", "two fields would get the same name; give each its own")
        return self

    def apply(self, events: DataFrame, stage: ProcessorStage) -> DataFrame:
        names = self._names()
        return change_rows(events, lambda row: paths.rename(row, names), may_concern=paths.mentions(list(names)))

    def takes_away(self, path: FieldPath) -> str | None:
        names = self._names()
        for old, new in names.items():
            # If two fields swap names, the path still names a field.
            if path[: len(old)] == old and old[-1] not in names.values():
                return f"it renames {old} to {new}: name it {FieldPath((*old[:-1], new, *path[len(old) :]))}"
        return None

    def before(self, path: FieldPath) -> FieldPath:
        for old, new in self._names().items():
            if path[: len(old)] == (*old[:-1], new):
                return FieldPath((*old, *path[len(old) :]))
        return path

    def earlier_paths(self, path: FieldPath) -> list[FieldPath]:
        return list(dict.fromkeys([path, self.before(path)]))

    def later_paths(self, path: FieldPath) -> list[FieldPath]:
        renamed = [
            FieldPath((*old[:-1], new, *path[len(old) :]))
            for old, new in self._names().items()
            if path[: len(old)] == old
        ]
        return [path, *renamed]  # a name with dots, such as "a.b", stays if only "a" is renamed

    def _names(self) -> dict[FieldPath, str]:
        return {FieldPath.of_row(old): self._last(old, new) for old, new in self.fields.items()}

    def _last(self, old: str, new: str) -> str:
        """The new last step. A whole path is accepted, too, if only its last step differs."""
        above, target = FieldPath.of_row(old)[:-1], new.split(".")
        if len(target) > 1 and tuple(target[:-1]) != above:
            raise PydanticCustomError(
                "rename", "{new}: rename changes only the last name of a field, not its place", {"new": repr(new)}
            )
        return target[-1]


class Flatten(Processor):
    """``collision`` decides if two fields get the same name: the last one in the document's order, the first one, or a
    dead letter."""

    type: Literal["flatten"]
    renames = True
    separator: NonEmpty = "__"
    """The text between the names of the outer and the inner field."""
    max_depth: Annotated[int, Field(ge=1, le=8)] = 4
    """How many levels of nested objects are replaced by fields of the row."""
    collision: Literal["last", "first", "error"] = "last"
    """If two fields get the same name: the last or the first one is kept, or (``error``) the event becomes a dead
    letter."""
    _kept_whole: frozenset[str] = PrivateAttr(default=frozenset())
    """Names that a later mask hides. An object with such a name is not divided, because the mask would not find its
    parts."""

    def can_fail(self) -> bool:
        return True

    def apply(self, events: DataFrame, stage: ProcessorStage) -> DataFrame:
        from pyspark.sql import functions as F

        if self.collision == "error":
            for name in ("before", "after"):
                twice = per_row(self._twice, "string", F.col(name), F.col("error"))
                reason = F.concat(F.lit(f"flatten: two fields of {name} get the name "), F.col("_twice"))
                marked = events.withColumn("_twice", twice)
                events = fail_where(marked, F.col("_twice").isNotNull(), stage=stage.name, reason=reason).drop("_twice")
        return change_rows(events, self._flat, may_concern=lambda text: text.count("{") > 1, grows_at=stage.name)

    def placed(self, earlier: Sequence[Processor], later: Sequence[Processor]) -> Processor:
        flatten = self.model_copy()
        flatten._kept_whole = frozenset(
            str(path)
            for at, mask in enumerate(later)
            for name in mask.named_fields()
            for shape in _shapes(FieldPath.of_row(name), [*earlier, self, *later[:at]])
            for path in _paths_before([self, *later[:at]], shape)
        )
        return flatten

    def takes_away(self, path: FieldPath) -> str | None:
        if not self.earlier_paths(path):
            return f"{path} can come from more than {_MAX_SPLITS} nested fields: choose another separator"
        if len(path) == 1 or self.separator == ".":
            return None
        return f"it lifts nested fields to the top: name it {self.separator.join(path)}"

    def before(self, path: FieldPath) -> FieldPath | None:
        """A name that contains the separator may come from a nested field."""
        return None if any(self.separator in step for step in path) else path

    def earlier_paths(self, path: FieldPath) -> list[FieldPath]:
        """Each way to split a name at the separator: ``a__b`` was ``a.b``, or already had that name."""
        candidates: list[tuple[str, ...]] = [()]
        for step in path:
            candidates = [(*before, *split) for before in candidates for split in self._splits(step)]
            if len(candidates) > _MAX_SPLITS:
                return []
        return [FieldPath(steps) for steps in candidates]

    def _splits(self, name: str) -> list[tuple[str, ...]]:
        """Separators may overlap: ``a___b`` was ``a`` that contains ``_b``, or ``a_`` that contains ``b``."""
        splits: list[tuple[str, ...]] = [(name,)]
        at = name.find(self.separator)
        while at >= 0 and len(splits) <= _MAX_SPLITS:
            splits += [(name[:at], *inner) for inner in self._splits(name[at + len(self.separator) :])]
            at = name.find(self.separator, at + 1)
        return splits

    def _flat(self, row: dict[str, Any]) -> bool:
        if not any(isinstance(value, dict) and value for value in row.values()):
            return False
        pairs = []
        size = 0
        for name, value in self._pairs(row, "", self.max_depth):
            size += len(name)  # long names of outer objects are repeated before the name of every inner field
            if size > MAX_ROW_BYTES:
                raise RowTooLarge
            pairs.append((name, value))
        row.clear()
        for name, value in pairs:
            if self.collision == "last":
                row.pop(name, None)  # so that it gets the position of the last one
            row.setdefault(name, value)
        return True

    def _twice(self, text: str | None, error: str | None) -> str | None:
        if text is None or error is not None:
            return None
        names: Counter[str] = Counter()
        size = 0
        for name, _ in self._pairs(parse(text), "", self.max_depth):
            names[name] += 1
            size += len(name)
            if size > MAX_ROW_BYTES:
                return None  # the change itself raises RowTooLarge
        return ", ".join(template_text(name) for name, times in names.items() if times > 1) or None

    def _pairs(self, row: dict[str, Any], prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
        for name, value in row.items():
            if isinstance(value, dict) and value and depth and prefix + name not in self._kept_whole:
                yield from self._pairs(value, f"{prefix}{name}{self.separator}", depth - 1)
            else:
                yield prefix + name, value


Change = Callable[[dict[str, Any]], bool]
_MAX_SPLITS = 256
_HASH = re.compile(r"[0-9a-f]{64}")
WITHHELD = "(withheld: this pipeline masks fields, and they cannot be found in what is no JSON)"


VALUE_WITHHELD = "(withheld)"
"""Replaces a value that is stored nowhere: a dead letter that contains it cannot be replayed."""


class _MaskedText(str):
    """A value that is masked already. Several paths can lead to one value, and it must be hashed only once."""

    __slots__ = ()


class _Hiding:
    """Masks fields of one row, under every path that they may have there."""

    def __init__(self, masks: Mapping[FieldPath, Callable[[Any], str]]) -> None:
        self._masks = masks

    def __call__(self, row: dict[str, Any]) -> bool:
        return paths.replace(row, list(self._masks), self._masked)

    def _masked(self, path: FieldPath, value: Any) -> str:
        return value if isinstance(value, _MaskedText) else _MaskedText(self._masks[path](value))

    def may_concern(self, text: str) -> bool:
        """Whether text that is no JSON may contain one of the fields. An escape sequence can spell any name."""
        return "\\" in text or any(path[-1] in text for path in self._masks)


class Mask(Processor):
    """A null stays null. An event's ``key`` is masked if it contains a masked field: as a member of a JSON object, or
    as a text that contains the value of the field."""

    type: Literal["mask"]
    fields: Annotated[dict[RowPath, Literal["hash", "redact"]], Field(min_length=1)]
    """How each field is masked, by its path: ``hash`` writes a SHA-256 of the salt and the value, ``redact`` the
    replacement."""
    salt: Secret = SecretStr("")
    """A secret that is hashed with each value, so that the value cannot be guessed from the hash."""
    replacement: Text = "***"
    """What replaces a field with ``redact``."""
    _shapes: dict[str, list[FieldPath]] = PrivateAttr(default_factory=dict)
    """The paths of each field in the rows that reach the mask."""

    def apply(self, events: DataFrame, stage: ProcessorStage) -> DataFrame:
        # The key first, because it is compared with the values before they are masked.
        may_concern = paths.mentions(list(self._kinds()))
        return change_rows(_with_masked_key(events, [self]), self.hides(), may_concern=may_concern)

    def placed(self, earlier: Sequence[Processor], later: Sequence[Processor]) -> Processor:
        mask = self.model_copy()
        mask._shapes = {name: _shapes(FieldPath.of_row(name), earlier) for name in self.fields}
        return mask

    def paths_of(self, name: str) -> list[FieldPath]:
        """Every path under which the field can be in a row that reaches the mask."""
        return self._shapes.get(name) or [FieldPath.of_row(name)]

    def named_fields(self) -> Iterator[str]:
        yield from self.fields

    def hides(self) -> Change:
        how = self._kinds()
        return lambda row: paths.replace(row, list(how), lambda path, value: self.masked(how[path], value))

    def hides_under(self, names: dict[str, list[FieldPath]]) -> _Hiding:
        """Masks each field under the paths that it has elsewhere, such as before a rename."""
        return _Hiding(
            {path: partial(self.masked, self.fields[name]) for name, earlier in names.items() for path in earlier}
        )

    def for_masked_letters(self, hashes: frozenset[str]) -> Mask:
        mask = _MaskAgain.model_construct(**dict(self))
        mask._shapes = self._shapes
        mask._hashes = hashes
        return mask

    def masked(self, kind: str, value: Any) -> str:
        if kind == "redact":
            return self.replacement
        return hashlib.sha256(f"{self.salt.get_secret_value()}{template_text(value)}".encode()).hexdigest()

    def masked_key(self, key: str | None, *rows: Any) -> str | None:
        """The key without clear values of masked fields, in any format of keys."""
        if key is None:
            return None
        hidden: dict[str, str] = {}
        for path, kind in self._kinds().items():
            for row in rows:
                for value in path.values(row):
                    hidden |= {text: self.masked(kind, inner) for text, inner in _hidden_texts(value)}
        hides = self.hides()
        return _masked_key(key, hides, hidden)

    def _kinds(self) -> dict[FieldPath, str]:
        kinds: dict[FieldPath, str] = {FieldPath.of_row(name): kind for name, kind in self.fields.items()}
        for name, kind in self.fields.items():
            for path in self.paths_of(name):
                kinds.setdefault(path, kind)
        return kinds


def _paths_before(processors: Sequence[Processor], path: FieldPath) -> list[FieldPath]:
    """Every path that ``path`` may have had before the processors; empty if that cannot be determined."""
    current = [path]
    for processor in reversed(processors):
        current = list(dict.fromkeys(earlier for later in current for earlier in processor.earlier_paths(later)))
    return current


def _shapes(path: FieldPath, processors: Sequence[Processor]) -> list[FieldPath]:
    """Every path that the field can have behind the processors, ``path`` first: flatten leaves lists, names with dots,
    and objects below its depth as they are."""
    shapes = {path: None}
    for at, flatten in enumerate(processors):
        if isinstance(flatten, Flatten):
            between = processors[at + 1 :]
            for name in _paths_before(between, path):
                current = [nested for nested in flatten.earlier_paths(name) if nested != name]
                for processor in between:
                    current = [later for earlier in current for later in processor.later_paths(earlier)]
                shapes |= dict.fromkeys(current)
    return list(shapes)


class _MaskAgain(Mask):
    """A mask for dead letters that were masked when they were written: it does not hash their hashes again."""

    _hashes: frozenset[str] = PrivateAttr(default=frozenset())

    def masked(self, kind: str, value: Any) -> str:
        if kind == "hash" and isinstance(value, str) and value in self._hashes:
            return value
        return super().masked(kind, value)


def _hidden_texts(value: Any) -> Iterator[tuple[str, Any]]:
    """A masked value, and each value inside it, with the texts that may represent it in a key."""
    if value is None or isinstance(value, bool):
        return
    yield template_text(value), value
    if isinstance(value, Number):
        yield canonical(value), value
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _hidden_texts(inner)


def _masked_key(key: str, hides: Change, hidden: Mapping[str, str]) -> str:
    """Searches a key that is JSON at any depth: each object as a row, each value, and each text within a value."""
    if key in hidden:
        return hidden[key]
    document = _parsed(key)
    if not isinstance(document, dict | list | str) or isinstance(document, Number):
        masked = None if not isinstance(document, Number) else hidden.get(canonical(document))
        return masked if masked is not None else _without_texts(key, hidden)
    holder = [document]
    changed = _mask_within(holder, hides, hidden)
    return write(holder[0]) if changed or has_duplicate_members(key) else key


def _mask_within(value: dict[str, Any] | list[Any], hides: Change, hidden: Mapping[str, str]) -> bool:
    changed = hides(value) if isinstance(value, dict) else False
    holder: Any = value
    for at, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
        if isinstance(inner, dict | list):
            changed |= _mask_within(inner, hides, hidden)
        elif inner is not None and not isinstance(inner, bool):
            text = template_text(inner)
            masked = hidden.get(canonical(inner)) if isinstance(inner, Number) else _masked_text(text, hides, hidden)
            masked = hidden.get(text, masked)
            if masked is not None and masked != text:
                holder[at], changed = masked, True
    return changed


def _masked_text(text: str, hides: Change, hidden: Mapping[str, str]) -> str:
    return _masked_key(text, hides, hidden) if text[:1] in ("{", "[", '"') else _without_texts(text, hidden)


_LONG_VALUE = 6
"""A value of at least this length is replaced within a longer text even without separators around it."""


def _without_texts(text: str, hidden: Mapping[str, str]) -> str:
    """The text with each hidden value replaced, such as in ``7|ann@example.com``; the longest values first."""
    contained = [value for value in hidden if value and value in text]
    if not contained:
        return text
    patterns = (
        re.escape(value) if len(value) >= _LONG_VALUE else rf"(?<![^\W_]){re.escape(value)}(?![^\W_])"
        for value in sorted(contained, key=len, reverse=True)
    )
    return re.sub("|".join(patterns), lambda match: hidden[match[0]], text)


def _with_masked_key(events: DataFrame, masks: Sequence[Mask]) -> DataFrame:
    from pyspark.sql import functions as F

    def masked(key: str | None, before: str | None, after: str | None) -> str | None:
        if key is None:
            return None
        rows = [_parsed(text) for text in (before, after)]
        for mask in masks:
            key = mask.masked_key(key, *rows)
        return key

    return events.withColumn("key", per_row(masked, "string", *map(F.col, ("key", "before", "after"))))


def _parsed(text: str | None) -> Any:
    try:
        return None if text is None else parse(text)
    except JsonError:
        return None


def hidden_before(processors: Sequence[Processor], passed: int = 0) -> list[Change]:
    """The masks that an event has not reached after ``passed`` processors, also for the names that fields have before
    rename and flatten.

    A value that has passed no mask is in clear, even if it looks like a hash. If an earlier name cannot be determined
    (sql, python), the row is withheld: each of its values is replaced.
    """
    changes: list[Change] = []
    for at, mask in enumerate(processors):
        if not isinstance(mask, Mask) or at < passed:
            continue
        names: dict[str, list[FieldPath]] = {}
        for name in mask.fields:
            earlier = current = mask.paths_of(name)
            for processor in reversed(processors[passed:at]):
                current = list(dict.fromkeys(path for later in current for path in processor.earlier_paths(later)))
                if not current:
                    return [_withhold_values]
                earlier = list(dict.fromkeys([*earlier, *current]))
            names[name] = earlier
        changes.append(mask.hides_under(names))
    return changes


_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,63}")


def _withhold_values(row: dict[str, Any]) -> bool:
    changed = dict(_withheld(row))
    if changed == row:
        return False
    row.clear()
    row.update(changed)
    return True


def _withheld(value: Any) -> Any:
    """The value with only its nulls and plain field names."""
    if value is None:
        return None
    if isinstance(value, list):
        return [_withheld(inner) for inner in value]
    if not isinstance(value, dict):
        return VALUE_WITHHELD
    return {
        name if _PLAIN_NAME.fullmatch(name) else f"(withheld {number})": _withheld(inner)
        for number, (name, inner) in enumerate(value.items())
    }


def conceal(failed: DataFrame, hidden: Mapping[str, Sequence[Change]], otherwise: Sequence[Change]) -> DataFrame:
    """Masks failed events in every field that the pipeline masks, independent of the stage at which they failed.

    ``hidden`` has the masks to apply by the stage at which an event failed; ``otherwise`` is for any other stage.
    ``payload`` is input that could not be read. Its fields may be at any depth, such as inside an envelope, so each
    object in it is treated as a row. A payload that is no JSON is withheld.
    """
    from pyspark.sql import functions as F

    if not otherwise:
        return failed

    def row(text: str | None, stage: str | None) -> str | None:
        changes = hidden.get(stage or "", otherwise)
        return text if text is None or not changes else _concealed(text, changes)

    def key(
        text: str | None, before: str | None, after: str | None, payload: str | None, stage: str | None
    ) -> str | None:
        changes = hidden.get(stage or "", otherwise)
        return text if text is None or not changes else _concealed_key(text, (before, after, payload), changes)

    texts = ("before", "after", "payload")
    failed = failed.withColumns({_CLEAR + name: F.col(name) for name in ("key", *texts)})
    for name in ("stream", "key"):
        failed = failed.withColumn(name, per_row(key, "string", *map(F.col, (name, *texts, "stage"))))
    failed = failed.withColumns({name: per_row(row, "string", F.col(name), F.col("stage")) for name in texts})
    texts_and_originals = [F.col(name) for name in (*(_CLEAR + name for name in ("key", *texts)), "key", *texts)]
    marked = failed.withColumn(HASHES, per_row(_new_hashes, "string", *texts_and_originals))
    return marked.drop(*(_CLEAR + name for name in ("key", *texts)))


HASHES = "_hashes"
_CLEAR = "_clear_"


def _new_hashes(*texts: str | None) -> str:
    """The hashes that ``conceal`` created: those in the second half of the texts that are not in the first half."""
    hashes = [set(_HASH.findall(text or "")) for text in texts]
    half = len(hashes) // 2
    return " ".join(sorted(set[str]().union(*hashes[half:]) - set[str]().union(*hashes[:half])))


def _concealed_key(key: str, rows: Sequence[str | None], changes: Sequence[Change]) -> str:
    """Conceals a key. JSON is concealed as JSON; text that equals or contains a concealed value is withheld. If a row
    cannot be searched, the whole key is withheld."""
    if _withhold_values in changes:
        return VALUE_WITHHELD
    hidden: set[str] = set()
    for text in rows:
        concealed = None if text is None else _concealed(text, changes)
        if text is None or concealed is None or concealed == text:
            continue
        if concealed == WITHHELD:
            return VALUE_WITHHELD
        hidden |= _scalars(parse(text)) - _scalars(parse(concealed))
    if isinstance(_parsed(key), dict | list):
        key = _concealed(key, changes)
    return _masked_key(key, lambda _: False, dict.fromkeys(hidden, VALUE_WITHHELD))


def _scalars(value: Any) -> set[str]:
    """Every value that is no object or list, as text, also from JSON documents inside strings."""
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return {text for item in inner for text in _scalars(item)}
    document = _parsed(value) if type(value) is str else None
    texts = {text for text, _ in _hidden_texts(value)}
    return texts | (_scalars(document) if isinstance(document, dict | list) else set())


def _concealed(text: str, changes: Sequence[Change]) -> str:
    try:
        value = parse(text)
        if not isinstance(value, dict | list):
            return WITHHELD
        if _withhold_values in changes:
            return write(_withheld(value))
        changed = _conceal(value, changes)
        return write(value) if changed or has_duplicate_members(text) else text
    except (JsonError, RecursionError):
        return WITHHELD


def _conceal(value: dict[str, Any] | list[Any], changes: Sequence[Change]) -> bool:
    """Applies the changes to every object in ``value`` as a row, also in JSON documents inside strings."""
    changed = False
    if isinstance(value, dict):
        for change in changes:  # all of them, also after one that changed the row
            changed |= change(value)
    holder: Any = value
    for at, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
        if isinstance(inner, dict | list):
            changed |= _conceal(inner, changes)
        elif type(inner) is str and ("{" in inner or "[" in inner):
            # A document may be encoded as text several times: '"{...}"'.
            document = [_parsed(inner)]
            if document[0] is None:
                # Several documents, a truncated one, or one with too many levels: it cannot be searched.
                if any(not isinstance(change, _Hiding) or change.may_concern(inner) for change in changes):
                    holder[at], changed = VALUE_WITHHELD, True
            elif isinstance(document[0], dict | list | str) and not isinstance(document[0], Number):
                duplicates = not isinstance(document[0], str) and has_duplicate_members(inner)
                if _conceal(document, changes) or duplicates:
                    holder[at], changed = write(document[0]), True
    return changed
