"""The consequences of errors: one row for each error that a server can return, one column for each phase of a call.

The page ``docs/operate/faults.md`` shows this table, and tests compare the code with it.
``python tests/support/fault_table.py`` prints it.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from millstream.errors import (
    AuthenticationFailed,
    BrokerUnavailable,
    MillstreamError,
    NoSuchGroup,
    OutOfMemory,
    PermissionDenied,
    ReadOnlyReplica,
    ServerError,
    ServerLoading,
    WrongKeyType,
)


class Phase(Enum):
    CONNECTING = "connecting"
    """PING or AUTH on a new connection, or the connection itself."""
    COMMAND = "first command"
    """The first command of a caller on an open connection."""
    BATCH = "middle of a batch"
    """A command of a pipeline, and all that follow it; the commands before it were stored."""
    TRANSACTION = "inside a transaction"
    """A command between MULTI and EXEC, or EXEC itself."""
    BLOCKED = "while blocked"
    """A blocking read."""


class Follows(Enum):
    RETRIED = "retried"
    """Retried, with pauses, until the deadline of the call; then raised as a retryable error."""
    FOLLOWED = "followed"
    """Repeated at once, at the node that the reply names."""
    RAISED = "raised"
    """Raised at once. Nothing was stored, or the error says what was."""
    FATAL = "fatal"
    """Raised at once, and ends long-running calls: a retry cannot succeed."""
    PERHAPS = "ambiguous"
    """A write that may not be repeated is raised with ``may_have_been_applied``; what may be repeated is retried."""
    NEVER = "-"
    """The server never replies with this error here."""


class FaultRow(NamedTuple):
    """One row. ``text`` is the reply as a server writes it; {slot} and {place} stand for a slot and for host:port."""

    name: str
    text: str
    raises: type[MillstreamError]
    """At once, or when the deadline is over."""
    connecting: Follows
    command: Follows
    batch: Follows
    transaction: Follows
    blocked: Follows
    means: str

    def follows(self, phase: Phase) -> Follows:
        return {
            Phase.CONNECTING: self.connecting,
            Phase.COMMAND: self.command,
            Phase.BATCH: self.batch,
            Phase.TRANSACTION: self.transaction,
            Phase.BLOCKED: self.blocked,
        }[phase]


RETRIED, FOLLOWED, RAISED, FATAL, PERHAPS, NEVER = Follows
EVERYWHERE = RETRIED, RETRIED, RETRIED, RETRIED, RETRIED

TABLE: tuple[FaultRow, ...] = (
    FaultRow(
        "LOADING",
        "LOADING Redis is loading the dataset in memory",
        ServerLoading,
        *EVERYWHERE,
        "the server was restarted and loads its data",
    ),
    FaultRow(
        "BUSY",
        "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
        ServerError,
        *EVERYWHERE,
        "a script has been running for too long",
    ),
    FaultRow(
        "OOM",
        "OOM command not allowed when used memory > 'maxmemory'.",
        OutOfMemory,
        *(NEVER, RETRIED, RETRIED, RETRIED, RETRIED),
        "maxmemory is reached; reads still work",
    ),
    FaultRow(
        "READONLY",
        "READONLY You can't write against a read only replica.",
        ReadOnlyReplica,
        *(NEVER, RETRIED, RETRIED, RETRIED, RETRIED),
        "the server is a replica now; the client looks for the primary",
    ),
    FaultRow(
        "MISCONF",
        "MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist to disk. Commands "
        "that may modify the data set are disabled, because this instance is configured to report errors during writes "
        "if RDB snapshotting fails (stop-writes-on-bgsave-error option). Please check the Redis logs for details about "
        "the RDB error.",
        ServerError,
        *EVERYWHERE,
        "the server's disk is full or broken",
    ),
    FaultRow(
        "NOREPLICAS",
        "NOREPLICAS Not enough good replicas to write.",
        ServerError,
        *(NEVER, RETRIED, RETRIED, RETRIED, RETRIED),
        "fewer replicas than min-replicas-to-write",
    ),
    FaultRow(
        "MASTERDOWN",
        "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
        ServerError,
        *EVERYWHERE,
        "a replica without its primary",
    ),
    FaultRow(
        "CLUSTERDOWN",
        "CLUSTERDOWN The cluster is down",
        ServerError,
        *(NEVER, RETRIED, RETRIED, RETRIED, RETRIED),
        "slots have no owner; the client reads the slot table again",
    ),
    FaultRow(
        "TRYAGAIN",
        "TRYAGAIN Multiple keys request during rehashing of slot",
        ServerError,
        *(NEVER, RETRIED, RETRIED, RETRIED, NEVER),
        "keys of one command are on two nodes while their slot moves",
    ),
    FaultRow(
        "MOVED",
        "MOVED {slot} {place}",
        ServerError,
        *(NEVER, FOLLOWED, FOLLOWED, FOLLOWED, FOLLOWED),
        "the slot has another owner",
    ),
    FaultRow(
        "ASK",
        "ASK {slot} {place}",
        ServerError,
        *(NEVER, FOLLOWED, FOLLOWED, RETRIED, FOLLOWED),
        "the slot is being moved; a transaction waits until the move is complete",
    ),
    FaultRow(
        "NOAUTH",
        "NOAUTH Authentication required.",
        AuthenticationFailed,
        *(FATAL, FATAL, FATAL, FATAL, FATAL),
        "a password is needed",
    ),
    FaultRow(
        "WRONGPASS",
        "WRONGPASS invalid username-password pair or user is disabled.",
        AuthenticationFailed,
        *(FATAL, NEVER, NEVER, NEVER, NEVER),
        "the password is wrong",
    ),
    FaultRow(
        "NOPERM",
        "NOPERM this user has no permissions to run the 'xadd' command",
        PermissionDenied,
        *(NEVER, FATAL, FATAL, FATAL, FATAL),
        "the ACL user lacks the permission; a PING that is refused for this reason does not prevent connecting",
    ),
    FaultRow(
        "NOSCRIPT",
        "NOSCRIPT No matching script. Please use EVAL.",
        ServerError,
        *(NEVER, FOLLOWED, FOLLOWED, NEVER, NEVER),
        "the node does not have the script: it is loaded there; transactions carry scripts as text",
    ),
    FaultRow(
        "NOGROUP",
        "NOGROUP No such key 'orders' or consumer group 'billing' in XREADGROUP with GROUP option",
        NoSuchGroup,
        *(NEVER, RAISED, RAISED, RAISED, RAISED),
        "the group was deleted; a subscriber creates it again",
    ),
    FaultRow(
        "WRONGTYPE",
        "WRONGTYPE Operation against a key holding the wrong kind of value",
        WrongKeyType,
        *(NEVER, RAISED, RAISED, RAISED, RAISED),
        "the key holds another type",
    ),
    FaultRow(
        "max clients",
        "ERR max number of clients reached",
        BrokerUnavailable,
        *(RETRIED, NEVER, NEVER, NEVER, NEVER),
        "maxclients is reached: the server closes the connection",
    ),
    FaultRow(
        "EXECABORT",
        "EXECABORT Transaction discarded because of previous errors.",
        ServerError,
        *(NEVER, NEVER, NEVER, RAISED, NEVER),
        "the reply names no reason; if it names one, the row of that reason applies",
    ),
    FaultRow(
        "EXECABORT: OOM",
        "EXECABORT Transaction discarded because of: OOM command not allowed when used memory > 'maxmemory'.",
        OutOfMemory,
        *(NEVER, NEVER, NEVER, RETRIED, NEVER),
        "EXEC itself was refused and names the reason",
    ),
    FaultRow(
        "UNBLOCKED",
        "UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)",
        ServerError,
        *(NEVER, NEVER, NEVER, NEVER, RETRIED),
        "the primary became a replica while a read was blocked",
    ),
    FaultRow(
        "no answer",
        "",
        BrokerUnavailable,
        *(RETRIED, PERHAPS, PERHAPS, PERHAPS, PERHAPS),
        "the connection broke after the command was sent",
    ),
)


def markdown() -> str:
    """The table as the page shows it."""
    lines = ["| the server replies | " + " | ".join(phase.value for phase in Phase) + " | raised as | which means |"]
    lines.append("|" + "---|" * (len(Phase) + 3))
    for fault in TABLE:
        cells = " | ".join(fault.follows(phase).value for phase in Phase)
        name = f"`{fault.name}`" if fault.text else fault.name
        lines.append(f"| {name} | {cells} | `{fault.raises.__name__}` | {fault.means} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown())
