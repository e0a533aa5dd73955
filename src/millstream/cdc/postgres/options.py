"""What a query of ``postgres_changes`` may ask for, beside what every change source may (``cdc/options.py``). Pure.

dsn             postgresql://user@host:5432/database, or libpq's key=value form.
tables          without a schema: public.
slot, publication
                their names; one slot for each query. Ids begin with the slot's name unless ``sourceName`` is given.
create          true: publication and slot are made where they are absent (default false).
unchanged       what stands for a value that Postgres did not send because it did not change; by default it is left
                out of the row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from millstream.cdc.errors import InvalidChangeOption
from millstream.cdc.options import FollowOptions, address, known_options, needed, read_options, truth
from millstream.cdc.postgres.connection import Login
from millstream.cdc.postgres.preparation import Wanted

_NAMES = ("slot", "publication", "create", "unchanged")
_SLOT_NAME = re.compile(r"[a-z0-9_]{1,63}")


@dataclass(frozen=True, slots=True)
class ChangeOptions:
    login: Login
    wanted: Wanted
    read: FollowOptions
    unchanged: str | None = None


def change_options(given: Mapping[str, str]) -> ChangeOptions:
    """Raises InvalidChangeOption."""
    values = known_options(given, _NAMES)
    slot = needed(values, "slot", "a name for the replication slot, such as millstream_orders")
    if not _SLOT_NAME.fullmatch(slot):
        raise InvalidChangeOption("slot", slot, "lower-case letters, digits and underscores, 63 at most")
    read = read_options(values, slot)
    publication = needed(values, "publication", "the publication's name")
    return ChangeOptions(
        login=Login(address(values, "postgresql://user@host:5432/database")),
        wanted=Wanted(read.tables, slot, publication, truth(values, "create")),
        read=read,
        unchanged=values.get("unchanged"),
    )
