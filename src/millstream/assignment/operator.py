"""What an operator asks from outside the fleet, over a blocking broker: who owns what, and let go of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from millstream.assignment.announcement import Announcement, balancer_group, balancer_stream
from millstream.assignment.errors import MalformedAnnouncement
from millstream.assignment.leases import OwnerRecord
from millstream.assignment.membership import Member, living
from millstream.assignment.ownership import NOBODY
from millstream.broker import BlockingBroker, beside, leases
from millstream.errors import InvalidArgument, MillstreamError, NoSuchGroup, NoSuchStream
from millstream.model import EntryId


class Assignment(NamedTuple):
    """``token`` is the last number; while there is an owner, it is also the millisecond at which the lease began."""

    stream: str
    lbs_id: EntryId
    info: Mapping[str, Any]
    owner: str
    token: int
    alive: bool


def assignments(broker: BlockingBroker, service: str, *, most: int = 100_000) -> list[Assignment]:
    """Every announced stream, in the order of the announcements."""
    name = balancer_stream(service)
    found: list[tuple[EntryId, Announcement]] = []
    for entry in broker.xrange(name, count=most):
        try:
            found.append((entry.id, Announcement.parse(entry.fields)))
        except MalformedAnnouncement:
            continue  # a member will bury it
    now_ms, _, rows = broker.run(leases.members, name)
    alive = living({member: Member.parse(row) for member, row in rows.items()}, now_ms)
    ownable = [one.stream for _, one in found if _can_be_owned(one.stream)]
    records, _ = broker.run(leases.read_leases, ownable)
    owned = {stream: OwnerRecord.parse(_known(record)) for stream, record in zip(ownable, records, strict=True)}
    owners = [owned.get(one.stream, OwnerRecord(0, "")) for _, one in found]
    return [
        Assignment(one.stream, lbs_id, one.info, owner.member, owner.number, owner.member in alive)
        for (lbs_id, one), owner in zip(found, owners, strict=True)
    ]


def _can_be_owned(stream: str) -> bool:
    """Anybody may announce anything: a name with a brace in it has no place for an owner record."""
    try:
        return bool(beside(stream, "owner"))
    except InvalidArgument:
        return False


def _known(record: bytes | MillstreamError | None) -> bytes | None:
    if isinstance(record, MillstreamError):
        raise record
    return record


def announce_stream(broker: BlockingBroker, service: str, announcement: Announcement) -> EntryId:
    added = broker.xadd(balancer_stream(service), announcement.fields())
    assert added is not None  # only create=False gives None
    return added


def force_release(broker: BlockingBroker, service: str, stream: str) -> str:
    """Voids the owner's token, and puts the announcement where the members' sweeps look. Returns who owned it."""
    found = [one for one in assignments(broker, service) if one.stream == stream]
    if not found:
        raise NoSuchStream(f"stream {stream!r} is not announced. `millstream assignments ls {service}` lists what is.")
    [record], _ = broker.run(leases.read_leases, [stream])
    held = _known(record)
    owner = OwnerRecord.parse(held)
    if held is not None and owner.member:
        broker.run(leases.release_lease, stream, held)
    name, group = balancer_stream(service), balancer_group(service)
    try:
        broker.xclaim_ids(name, group, NOBODY, [one.lbs_id for one in found], min_idle_ms=0)
    except NoSuchGroup:
        pass  # no member was ever there: the first one makes the group, and reads every announcement
    return owner.member
