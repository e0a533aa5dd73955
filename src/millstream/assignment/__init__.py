"""Whole streams handed to workers: announced on a load-balancer stream, held by lease, fenced by token, taken over.

In: announcements. Out: notifications through one bounded queue. Nothing here reads a data stream by itself (messaging
does), and nothing depends on a notification of the server: a sweep finds whatever was missed.
"""

from millstream.assignment.announcement import Announcement, balancer_stream
from millstream.assignment.client import AssignmentClient
from millstream.assignment.errors import (
    MalformedAnnouncement,
    MemberClosed,
    NotTheOwner,
    StreamIsOwned,
)
from millstream.assignment.leases import Token
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
from millstream.assignment.partitions import PartitionedPublisher
from millstream.assignment.subscriber import AssignedSubscriber, PartitionedSubscriber, assigned_subscriber
from millstream.messaging import partition_of, partition_streams

__all__ = [
    "Announcement",
    "AssignedSubscriber",
    "Assignment",
    "AssignmentClient",
    "AssignmentMember",
    "MalformedAnnouncement",
    "MemberClosed",
    "NotTheOwner",
    "Notification",
    "Notifications",
    "PartitionedPublisher",
    "PartitionedSubscriber",
    "Settings",
    "StreamAdded",
    "StreamDisowned",
    "StreamExpired",
    "StreamIsOwned",
    "StreamTerminated",
    "Token",
    "announce_stream",
    "assigned_subscriber",
    "assignments",
    "balancer_stream",
    "force_release",
    "partition_of",
    "partition_streams",
]
