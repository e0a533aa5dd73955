"""Operations for people and tools, over a blocking broker: list owners, announce a stream, force a release."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from millstream.assignment.announcement import Announcement, add_announcements, balancer_group, balancer_stream
from millstream.assignment.errors import MalformedAnnouncement, MalformedOwnerRecord
from millstream.assignment.leases import OwnerRecord
from millstream.assignment.membership import living, parse_members
from millstream.assignment.ownership import UNOWNED
from millstream.broker import BlockingBroker, companion_key
from millstream.broker.scripts import leases
from millstream.errors import InvalidArgument, MillstreamError, NoSuchGroup, NoSuchStream
from millstream.model import EntryId


class Assignment(NamedTuple):
    """An announced stream and its owner. ``token`` is the number of the last token. While there is an owner, it is
    usually also the millisecond at which the lease began."""

    stream: str
    lbs_id: EntryId
    info: Mapping[str, Any]
    owner: str
    token: int
    alive: bool


def assignments(broker: BlockingBroker, service: str, *, limit: int = 100_000) -> list[Assignment]:
    """Announced streams, in the order of their announcements; at most ``limit``."""
    name = balancer_stream(service)
    announced: list[tuple[EntryId, Announcement]] = []
    for entry in broker.xrange(name, count=limit):
        try:
            announced.append((entry.id, Announcement.parse(entry.fields)))
        except MalformedAnnouncement:
            continue  # a member will dead-letter it
    now_ms, _, rows = broker.run(leases.members, name)
    alive = living(parse_members(rows)[0], now_ms)
    ownable = [announcement.stream for _, announcement in announced if _can_be_owned(announcement.stream)]
    records, _ = broker.run(leases.read_leases, ownable)
    owned = {stream: _owner_of(_value_of(record)) for stream, record in zip(ownable, records, strict=True)}
    owners = [owned.get(announcement.stream, OwnerRecord(0, "")) for _, announcement in announced]
    return [
        Assignment(each.stream, lbs_id, each.info, owner.member, owner.number, owner.member in alive)
        for (lbs_id, each), owner in zip(announced, owners, strict=True)
    ]


def _can_be_owned(stream: str) -> bool:
    """Whether the stream can have an owner record. Any client may announce any name; one with a brace cannot have
    one."""
    try:
        return bool(companion_key(stream, "owner"))
    except InvalidArgument:
        return False


def _owner_of(record: bytes | None) -> OwnerRecord:
    """The owner; none if the record is malformed: members do not take such a stream, and log why."""
    try:
        return OwnerRecord.parse(record)
    except MalformedOwnerRecord:
        return OwnerRecord(0, "")


def _value_of(record: bytes | MillstreamError | None) -> bytes | None:
    if isinstance(record, MillstreamError):
        raise record
    return record


def announce_stream(broker: BlockingBroker, service: str, announcement: Announcement) -> EntryId:
    """Announces a stream on the load-balancer stream of a service, so that a member takes it."""
    [lbs_id] = broker.run(add_announcements, balancer_stream(service), [announcement])
    return lbs_id


def force_release(broker: BlockingBroker, service: str, stream: str) -> str:
    """Invalidates the owner's token, and moves the announcement to where members scan. Returns the previous owner."""
    of_stream = [assignment for assignment in assignments(broker, service) if assignment.stream == stream]
    if not of_stream:
        raise NoSuchStream(
            f"stream {stream!r} is not announced. `millstream assignments ls {service}` lists announced streams."
        )
    [record], _ = broker.run(leases.read_leases, [stream])
    current = _value_of(record)
    owner = OwnerRecord.parse(current)
    if current is not None and owner.member:
        broker.run(leases.release_lease, stream, current)
    name, group = balancer_stream(service), balancer_group(service)
    try:
        broker.xclaim_ids(name, group, UNOWNED, [assignment.lbs_id for assignment in of_stream], min_idle_ms=0)
    except NoSuchGroup:
        pass  # no member has joined yet: the first one creates the group and reads every announcement
    return owner.member
