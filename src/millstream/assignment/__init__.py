"""Assigns whole streams to members of a service, under leases with fencing tokens.

Streams are announced on a load-balancer stream. Members take leases, take over the streams of dead members, and report
to the application through one bounded queue of notifications. This package does not read data streams: messaging does.
It does not depend on keyspace notifications either: scans find every stream without an owner.
"""

from millstream.assignment.announcement import Announcement, balancer_stream
from millstream.assignment.client import AssignmentClient
from millstream.assignment.errors import (
    MalformedAnnouncement,
    MemberClosed,
    NotTheOwner,
    StreamIsOwned,
)
from millstream.assignment.leases import FencingToken
from millstream.assignment.member import AssignmentMember
from millstream.assignment.membership import Settings
from millstream.assignment.notifications import (
    Notification,
    Notifications,
    StreamAdded,
    StreamDisowned,
    StreamExpired,
    StreamTerminated,
)
from millstream.assignment.operator import Assignment, announce_stream, assignments, force_release
from millstream.assignment.subscriber import AssignedSubscriber, PartitionedSubscriber, assigned_subscriber
from millstream.messaging import partition_of, partition_streams

__all__ = [
    "Announcement",
    "AssignedSubscriber",
    "Assignment",
    "AssignmentClient",
    "AssignmentMember",
    "FencingToken",
    "MalformedAnnouncement",
    "MemberClosed",
    "NotTheOwner",
    "Notification",
    "Notifications",
    "PartitionedSubscriber",
    "Settings",
    "StreamAdded",
    "StreamDisowned",
    "StreamExpired",
    "StreamIsOwned",
    "StreamTerminated",
    "announce_stream",
    "assigned_subscriber",
    "assignments",
    "balancer_stream",
    "force_release",
    "partition_of",
    "partition_streams",
]
