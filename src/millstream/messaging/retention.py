"""How long a stream keeps its entries: a policy for each stream, and a janitor that applies it.

Entries that a group still needs are kept. The hard limits are the only exception: what they remove is counted and
logged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Self

from millstream.broker.operations.info import group_info
from millstream.broker.operations.streams import xrange
from millstream.broker.scripts import retention
from millstream.broker.scripts.retention import Retained
from millstream.broker.scripts.script import Fence
from millstream.errors import InvalidArgument, MillstreamError
from millstream.messaging.failure import text_of
from millstream.model import EntryId, GroupInfo, Observer, milliseconds, parse_duration_ms, parse_size_bytes
from millstream.model.policies import guarded

if TYPE_CHECKING:
    from millstream.broker import Broker, BrokerProtocol

log = logging.getLogger("millstream.retention")

DEAD_LETTERS = ".dlq"
"""The suffixes of dead-letter streams: of a stream, and of a pipeline."""
LOAD_BALANCER = "-input"
"""How the names of load-balancer streams end. Names of other streams can end so, too: see ANNOUNCEMENT_FIELD."""
ANNOUNCEMENT_FIELD = b"lbs-input"
"""The field of every entry of a load-balancer stream (``millstream.assignment``)."""
DEAD_AFTER_MS = 3_600_000
"""A group is reported as dead if none of its consumers interacted with it for longer."""
STEPS_PER_CALL = 10
"""The script calls of one ``delete_acked`` operation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """Which entries may be deleted. Limits that are None do not apply; at least one must be set.

    ``keep_acked_ms``: how long an entry stays after every group has acknowledged it (up to a sixteenth and one interval
    longer). The other limits apply as far as the groups allow. ``hard_max_len``, ``hard_max_bytes`` and
    ``hard_max_age_ms`` apply even to entries that groups need. They protect the server's memory, or delete data that
    must not be kept for longer. Messages are lost, and counted for each group.

    ``delete_acked``: entries are deleted as soon as every group has acknowledged them, also those behind an entry that
    is still pending. A group that is created later does not see them.
    """

    max_age_ms: int | None = None
    max_len: int | None = None
    max_bytes: int | None = None
    keep_acked_ms: int | None = None
    hard_max_len: int | None = None
    hard_max_bytes: int | None = None
    hard_max_age_ms: int | None = None
    delete_acked: bool = False

    def __post_init__(self) -> None:
        limits = self.limits()
        for name, value in limits.items():
            if value is not None and (type(value) is not int or value < 0):
                raise InvalidArgument(f"retention.{name}", value, "a whole number that is not negative, or None")
        if type(self.delete_acked) is not bool:
            raise InvalidArgument("retention.delete_acked", self.delete_acked, "True or False")
        if all(value is None for value in limits.values()) and not self.delete_acked:
            raise InvalidArgument("retention", self, f"at least one of {', '.join(limits)}, delete_acked")
        if self.delete_acked and self.keep_acked_ms:
            raise InvalidArgument("retention.keep_acked_ms", self.keep_acked_ms, "None, because of delete_acked")
        pairs = (("max_len", "hard_max_len"), ("max_bytes", "hard_max_bytes"), ("max_age_ms", "hard_max_age_ms"))
        for soft, hard in pairs:
            if limits[soft] is not None and limits[hard] is not None and limits[hard] < limits[soft]:
                raise InvalidArgument(f"retention.{hard}", limits[hard], f"{soft} ({limits[soft]}) or more")

    def limits(self) -> dict[str, Any]:
        """The limits by name; None: no such limit."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "delete_acked"}

    @property
    def has_limits(self) -> bool:
        return any(value is not None for value in self.limits().values())

    def __str__(self) -> str:
        """The same text for equal policies: what workers declare."""
        limits = [f"{name}={value}" for name, value in self.limits().items() if value is not None]
        return " ".join([*limits, *(["delete_acked"] if self.delete_acked else [])])

    @classmethod
    def parse(cls, written: Mapping[str, object], *, argument: str = "retention") -> Self:
        """Parses a policy from texts and numbers: ``{"max_age": "7d", "max_len": 100000, "max_bytes": "1gb",
        "keep_acked": "1h"}``."""
        readers = {
            "max_age": ("max_age_ms", parse_duration_ms),
            "hard_max_age": ("hard_max_age_ms", parse_duration_ms),
            "keep_acked": ("keep_acked_ms", parse_duration_ms),
            "max_bytes": ("max_bytes", parse_size_bytes),
            "hard_max_bytes": ("hard_max_bytes", parse_size_bytes),
            "max_len": ("max_len", _parse_count),
            "hard_max_len": ("hard_max_len", _parse_count),
        }
        limits: dict[str, Any] = {}
        for name, value in written.items():
            if name == "delete_acked":
                limits[name] = value
                continue
            if name not in readers:
                allowed = f"one of the limits {', '.join(sorted(readers))}, or delete_acked"
                raise InvalidArgument(f"{argument}.{name}", value, allowed)
            if value is not None:
                limit, reader = readers[name]
                limits[limit] = reader(str(value), f"{argument}.{name}")
        return cls(**limits)


KEEP = "keep"
DELETE_ACKED = "delete_acked"
RETENTION_OPTIONS = frozenset({KEEP, DELETE_ACKED})
"""The options of a route that are not its subscriber's."""


def policy_of(options: Mapping[str, Any]) -> RetentionPolicy | None:
    """The policy that the options ``keep`` and ``delete_acked`` of a route ask for; None: entries are kept.

    Raises InvalidArgument.
    """
    keep, delete_acked = options.get(KEEP), options.get(DELETE_ACKED, False)
    if type(delete_acked) is not bool:
        raise InvalidArgument(DELETE_ACKED, delete_acked, "True or False")
    if isinstance(keep, str):
        keep = RetentionPolicy(max_age_ms=parse_duration_ms(keep, KEEP))
    if keep is None:
        return RetentionPolicy(delete_acked=True) if delete_acked else None
    if not isinstance(keep, RetentionPolicy):
        raise InvalidArgument(KEEP, keep, "a duration such as '7d', a RetentionPolicy, or None")
    return replace(keep, delete_acked=True) if delete_acked else keep


@dataclass(frozen=True, slots=True)
class HoldingGroup:
    """A group that prevents the deletion of entries that exceed the policy's limits.

    ``idle_ms`` is the time since any of its consumers interacted with the group; None if it has no consumers.
    ``dead``: this time exceeds the limit. If ``holds_back`` equals the size of a step, more entries may be held back.
    """

    group: str
    holds_back: int
    oldest_needed: EntryId | None
    idle_ms: int | None
    dead: bool


@dataclass(frozen=True, slots=True)
class StreamReport:
    retained: Retained
    holding: Sequence[HoldingGroup]

    @property
    def dead_groups(self) -> list[HoldingGroup]:
        return [group for group in self.holding if group.dead]


def holding_groups(retained: Retained, groups: Sequence[GroupInfo], dead_after_ms: int) -> list[HoldingGroup]:
    """The groups that hold entries back, the one with the most first. Pure."""
    idle = {info.name: min((group.idle_ms for group in info.consumers), default=None) for info in groups}
    holding = []
    for hold in retained.groups:
        if hold.holds_back:
            idle_ms = idle.get(hold.group)
            dead = idle_ms is None or idle_ms > dead_after_ms
            holding.append(HoldingGroup(hold.group, hold.holds_back, hold.oldest_needed, idle_ms, dead))
    return sorted(holding, key=lambda group: -group.holds_back)


class PolicyRunner:
    """Applies policies to streams, and reports what was deleted and which groups hold entries back."""

    def __init__(self, broker: BrokerProtocol, observer: Observer, dead_after_ms: int) -> None:
        self._broker = broker
        self._observer = observer
        self._dead_after_ms = dead_after_ms
        self._named: set[tuple[str, str]] = set()
        """Dead groups that the log has named already."""

    async def apply(self, stream: str, policy: RetentionPolicy, *, fence: Fence | None = None) -> StreamReport:
        """Applies the policy once. With a ``fence``, the housekeeping lease, raises StaleOwner if it was lost."""
        deleted = length = 0
        cursor: bytes | None = b"" if policy.delete_acked else None
        while cursor is not None:
            done = await self.delete_acked(stream, cursor, fence=fence)
            deleted, length, cursor = deleted + done.deleted, done.length, done.cursor or None
        retained = Retained(stream, 0, length, 0, [])
        if policy.has_limits:
            retained = await self._broker.run(retention.retain, stream, fence=fence, **policy.limits())
        retained = replace(retained, dropped=retained.dropped + deleted)
        holding: list[HoldingGroup] = []
        if any(hold.holds_back for hold in retained.groups):
            holding = holding_groups(retained, await self._broker.run(group_info, stream), self._dead_after_ms)
        report = StreamReport(retained, holding)
        self._report(report)
        return report

    async def delete_acked(
        self, stream: str, cursor: bytes = b"", *, fence: Fence | None = None
    ) -> retention.AckedDeletion:
        """Deletes what every group has acknowledged, in the part of the stream that starts at the cursor."""
        return await self._broker.run(retention.delete_acked, stream, cursor=cursor, steps=STEPS_PER_CALL, fence=fence)

    def _report(self, report: StreamReport) -> None:
        retained = report.retained
        stream = retained.stream
        self._observer("messaging.trimmed", stream=stream, dropped=retained.dropped, length=retained.length)
        for hold in retained.groups:
            if hold.undelivered or hold.unacked:
                lost = {"undelivered": hold.undelivered, "unacked": hold.unacked}
                self._observer("messaging.dropped_undelivered", stream=stream, group=hold.group, **lost)
                log.error(
                    "the hard cap of %r took %d undelivered and %d unacknowledged entries from group %r",
                    *(stream, hold.undelivered, hold.unacked, hold.group),
                )
        for group in report.holding:
            self._observer(
                "messaging.held_back",
                stream=stream,
                group=group.group,
                entries=group.holds_back,
                idle_ms=group.idle_ms,
                dead=group.dead,
            )
        for group in report.dead_groups:
            silent = "it has no consumer" if group.idle_ms is None else f"silent for {group.idle_ms // 1000} s"
            if (stream, group.group) in self._named:  # logged once; observers receive the event every time
                continue
            log.warning(
                "group %r of %r looks dead (%s) and holds back %d entries or more, from %s on. Delete or revive it.",
                *(group.group, stream, silent, group.holds_back, group.oldest_needed),
            )
        self._named = {pair for pair in self._named if pair[0] != stream}
        self._named |= {(stream, group.group) for group in report.dead_groups}


class Janitor:
    """Applies policies repeatedly: inside a service (``async with Janitor(...)``) or by itself (``await run()``).

    ``policies`` maps a stream's name, or a glob such as ``events.*``, to its policy; the first that matches a stream
    applies. Dead-letter streams are matched only by their own name or by a glob that ends in ``.dlq``. Load-balancer
    streams are matched only by their own name or by a glob that ends in ``-input``: a data stream whose announcement is
    trimmed gets no owner. Several janitors may run at once. An error of one stream is reported, and does not affect the
    next one. ``observer``: the broker's by default.
    """

    def __init__(
        self,
        broker: Broker,
        policies: Mapping[str, RetentionPolicy],
        *,
        interval_ms: int | None = None,
        dead_after_ms: int | None = None,
        observer: Observer | None = None,
    ) -> None:
        if not policies:
            raise InvalidArgument("policies", policies, "at least one stream and its policy")
        for name, policy in policies.items():
            if not name:
                raise InvalidArgument("policies", name, "the name of a stream, or a glob")
            if not isinstance(policy, RetentionPolicy):
                raise InvalidArgument(f"policies[{name!r}]", policy, "a RetentionPolicy")
        self._broker = broker
        self._policies = dict(policies)
        self._interval = milliseconds("interval", interval_ms, 60_000, least=1) / 1000
        self._observer = broker.context.observer if observer is None else guarded(observer)
        self._runner = PolicyRunner(broker, self._observer, milliseconds("dead_after", dead_after_ms, DEAD_AFTER_MS))
        self._task: asyncio.Task[None] | None = None

    async def sweep(self) -> list[StreamReport]:
        """One pass over all streams."""
        reports = []
        for stream, policy in (await self._streams()).items():
            try:
                reports.append(await self.tend(stream, policy))
            except MillstreamError as error:
                self._observer("messaging.retention_failed", stream=stream, error=str(error))
                log.warning("retention of %r failed: %s", stream, error)
            except Exception as error:  # after any error, because the next streams grow too
                self._observer("messaging.retention_failed", stream=stream, error=text_of(error))
                log.exception("retention of %r failed", stream)
        return reports

    async def tend(self, stream: str, policy: RetentionPolicy) -> StreamReport:
        """Applies the policy to one stream now."""
        return await self._runner.apply(stream, policy)

    async def run(self) -> None:
        """Runs until it is cancelled."""
        while True:
            try:
                await self.sweep()
            except MillstreamError as error:  # listing the streams failed
                self._observer("messaging.retention_failed", stream="", error=str(error))
                log.warning("retention could not list streams: %s", error)
            except Exception as error:  # if it ended silently, it would be noticed only when the memory is full
                self._observer("messaging.retention_failed", stream="", error=text_of(error))
                log.exception("retention could not list streams")
            await asyncio.sleep(self._interval)

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self.run(), name="millstream-janitor")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _streams(self) -> dict[str, RetentionPolicy]:
        chosen: dict[str, RetentionPolicy] = {}
        for name, policy in self._policies.items():
            matching = await self._broker.list_streams(name) if _is_glob(name) else [name]
            for stream in matching:
                # No group needs a dead letter, so a policy for all streams would delete dead letters.
                if not name.endswith(DEAD_LETTERS) and stream.endswith(DEAD_LETTERS):
                    continue
                if stream in chosen or (
                    not name.endswith(LOAD_BALANCER) and await is_load_balancer(self._broker, stream)
                ):
                    continue
                chosen[stream] = policy
        return chosen


async def is_load_balancer(broker: BrokerProtocol, stream: str) -> bool:
    """Whether the stream announces streams to members: a stream whose announcement is deleted gets no owner."""
    if not stream.endswith(LOAD_BALANCER):
        return False
    return any(ANNOUNCEMENT_FIELD in entry.fields for entry in await broker.run(xrange, stream, count=10))


def _is_glob(name: str) -> bool:
    return any(sign in name for sign in "*?[")


def _parse_count(text: str, argument: str) -> int:
    if not text.isdecimal():
        raise InvalidArgument(argument, text, "a whole number that is not negative")
    return int(text)
