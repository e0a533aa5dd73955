"""Where the columns of rows lie in pgoutput's tuples and in COPY's binary rows, found column by column."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.cdc.errors import UnreadableMessage
from millstream.cdc.json_columns import NULL, UNCHANGED, UNTOLD, VALUE, Places, texts
from millstream.cdc.postgres.pgoutput import Relation
from millstream.cdc.segments import Bytes, Numbers, byte_view

_TEXT, _NOTHING, _TOAST = b"tnu"


def walk_tuples(body: Bytes, at: Numbers, count: int) -> Iterator[Places]:
    """Column by column through pgoutput's tuples, of which ``at`` are the first columns."""
    sizes = byte_view(body, ">i4")
    for _ in range(count):
        kind = body[at]
        has = kind == _TEXT
        lengths = np.where(has, sizes[at + 1], 0).astype(np.int64)
        states = np.where(has, VALUE, np.where(kind == _TOAST, UNCHANGED, NULL)).astype(np.uint8)
        if not np.isin(kind, (_TEXT, _NOTHING, _TOAST)).all():
            raise UnreadableMessage("a column is neither text, nor null, nor unchanged: is the protocol version 1?")
        begins = at + np.where(has, 5, 1)
        yield Places(begins, lengths, states)
        at = begins + lengths


def walk_copied_rows(body: Bytes, at: Numbers, count: int) -> Iterator[Places]:
    """Column by column through COPY's binary rows."""
    sizes = byte_view(body, ">i4")
    for _ in range(count):
        size = sizes[at].astype(np.int64)
        lengths = np.maximum(size, 0)
        yield Places(at + 4, lengths, np.where(size < 0, NULL, VALUE).astype(np.uint8))
        at = at + 4 + lengths


def filled(fresh: Places, stale: Places, known: bool) -> Places:
    """The old value where the new one was not sent. Beside a key the other old columns are empty, and say nothing."""
    take = (fresh.states == UNCHANGED) & (stale.states != UNCHANGED) & known
    if not take.any():
        return fresh
    return Places(
        np.where(take, stale.begins, fresh.begins),
        np.where(take, stale.lengths, fresh.lengths),
        np.where(take, stale.states, fresh.states),
    )


def key_only(columns: Sequence[Places], relation: Relation) -> list[Places]:
    """Beside a key the other columns are null in the message, whatever they are in the table: untold, so not shown."""
    return [
        places if at in relation.key else places._replace(states=np.full_like(places.states, UNTOLD))
        for at, places in enumerate(columns)
    ]


def key_changed(body: Bytes, old: Sequence[Places], new: Sequence[Places], relation: Relation) -> npt.NDArray[np.bool_]:
    changed = np.zeros(len(old[0].begins), dtype=np.bool_)
    for at in relation.key:
        same = pc.equal(texts_at(body, old[at]), texts_at(body, new[at])).fill_null(False)
        changed |= ~same.to_numpy(zero_copy_only=False) & (new[at].states == VALUE)
    return changed


def texts_at(body: Bytes, places: Places) -> pa.Array:
    """``texts`` for places that need not ascend: an old and a new row's column may be mixed in them."""
    if len(places.begins) < 2 or (np.diff(places.begins) > 0).all():
        return texts(body, places)
    order = np.argsort(places.begins, kind="stable")
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return texts(body, places.at(order)).take(pa.array(back))
