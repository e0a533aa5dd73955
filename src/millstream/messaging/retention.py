"""How long a stream keeps its entries: a policy for each stream, and a janitor that applies it.

Nothing goes that a group still needs. The hard limits are the one exception: a switch of its own, counted and logged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Self

from millstream.broker import Retained, retention
from millstream.errors import InvalidArgument, MillstreamError
from millstream.messaging.failure import text_of
from millstream.model import EntryId, GroupInfo, Observer, Seconds, milliseconds, parse_duration_ms, parse_size_bytes

if TYPE_CHECKING:
    from millstream.broker import Broker

log = logging.getLogger("millstream.retention")

DEAD_LETTERS = ".dlq"
"""How the names of their streams end, beside a stream and of a pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """What may go. Limits that are None do not count; one at least must be set.

    ``keep_acked_ms``: how long an entry stays after every group has acknowledged it (up to a sixteenth and one interval
    longer). The other limits bound what stays, as far as the groups allow. ``hard_max_len``, ``hard_max_bytes`` and
    ``hard_max_age_ms`` hold whatever the groups say: they protect the server's memory, or keep what must not be kept
    for longer from staying; and they lose entries, counted for each group.
    """

    max_age_ms: int | None = None
    max_len: int | None = None
    max_bytes: int | None = None
    keep_acked_ms: int | None = None
    hard_max_len: int | None = None
    hard_max_bytes: int | None = None
    hard_max_age_ms: int | None = None

    def __post_init__(self) -> None:
        limits = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in limits.items():
            if value is not None and (type(value) is not int or value < 0):
                raise InvalidArgument(f"retention.{name}", value, "a whole number that is not negative, or None")
        if all(value is None for value in limits.values()):
            raise InvalidArgument("retention", self, f"at least one of {', '.join(limits)}")
        pairs = (("max_len", "hard_max_len"), ("max_bytes", "hard_max_bytes"), ("max_age_ms", "hard_max_age_ms"))
        for soft, hard in pairs:
            if limits[soft] is not None and limits[hard] is not None and limits[hard] < limits[soft]:
                raise InvalidArgument(f"retention.{hard}", limits[hard], f"{soft} ({limits[soft]}) or more")

    @classmethod
    def parse(cls, written: Mapping[str, object], *, argument: str = "retention") -> Self:
        """Reads what people write: ``{"max_age": "7d", "max_len": 100000, "max_bytes": "1gb", "keep_acked": "1h"}``."""
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
            if name not in readers:
                raise InvalidArgument(f"{argument}.{name}", value, f"one of the limits {', '.join(sorted(readers))}")
            if value is not None:
                limit, reader = readers[name]
                limits[limit] = reader(str(value), f"{argument}.{name}")
        return cls(**limits)


@dataclass(frozen=True, slots=True)
class HoldingGroup:
    """A group that keeps entries in the stream which the policy wants gone.

    ``idle_ms`` is the time since any of its consumers was seen, None where it has none. ``dead`` says that this is
    longer than a living group would be silent. ``holds_back`` is "at least" when it equals a step's size.
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
        return [each for each in self.holding if each.dead]


def holding_groups(retained: Retained, groups: Sequence[GroupInfo], dead_after_ms: int) -> list[HoldingGroup]:
    """Who holds entries back, the one with most first. Pure."""
    idle = {info.name: min((each.idle_ms for each in info.consumers), default=None) for info in groups}
    found = []
    for hold in retained.groups:
        if hold.holds_back:
            idle_ms = idle.get(hold.group)
            dead = idle_ms is None or idle_ms > dead_after_ms
            found.append(HoldingGroup(hold.group, hold.holds_back, hold.oldest_needed, idle_ms, dead))
    return sorted(found, key=lambda each: -each.holds_back)


class Janitor:
    """Applies policies now and then: inside a service (``async with Janitor(...)``) or by itself (``await run()``).

    ``policies`` goes from a stream's name, or a glob such as ``events.*``, to its policy; the first that matches a
    stream decides. Dead letters are matched only where they are named: by their stream, or by a glob that ends in
    ``.dlq``. Several janitors at once do no harm. A stream that fails is reported, and the next one is tended.
    ``observer`` is the broker's, unless another is given.
    """

    def __init__(
        self,
        broker: Broker,
        policies: Mapping[str, RetentionPolicy],
        *,
        interval_ms: int | None = None,
        dead_after_ms: int | None = None,
        observer: Observer | None = None,
        interval: Seconds | None = None,
        dead_after: Seconds | None = None,
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
        self._interval = milliseconds("interval", interval_ms, 60_000, interval, least=1) / 1000
        self._dead_after_ms = milliseconds("dead_after", dead_after_ms, 3_600_000, dead_after)
        self._observer = observer or broker.context.observer
        self._task: asyncio.Task[None] | None = None
        self._named: set[tuple[str, str]] = set()
        """Dead groups that the log has named already."""

    async def sweep(self) -> list[StreamReport]:
        """One pass over all streams."""
        reports = []
        for stream, policy in (await self._streams()).items():
            try:
                reports.append(await self.tend(stream, policy))
            except MillstreamError as error:
                self._observer("messaging.retention_failed", stream=stream, error=str(error))
                log.warning("retention of %r failed: %s", stream, error)
            except Exception as error:  # whatever it was, the streams after this one grow no less
                self._observer("messaging.retention_failed", stream=stream, error=text_of(error))
                log.exception("retention of %r failed", stream)
        return reports

    async def tend(self, stream: str, policy: RetentionPolicy) -> StreamReport:
        """One stream, now."""
        retained = await self._broker.run(retention.retain, stream, **asdict(policy))
        holding: list[HoldingGroup] = []
        if any(hold.holds_back for hold in retained.groups):
            holding = holding_groups(retained, await self._broker.group_info(stream), self._dead_after_ms)
        report = StreamReport(retained, holding)
        self._tell(report)
        return report

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            try:
                await self.sweep()
            except MillstreamError as error:  # listing the streams failed
                self._observer("messaging.retention_failed", stream="", error=str(error))
                log.warning("retention could not list streams: %s", error)
            except Exception as error:  # a janitor that ended in silence would show only when the memory is full
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
                # No group needs a dead letter, so nothing would hold it back: a policy for all streams is not for them.
                if name.endswith(DEAD_LETTERS) or not stream.endswith(DEAD_LETTERS):
                    chosen.setdefault(stream, policy)
        return chosen

    def _tell(self, report: StreamReport) -> None:
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
        for each in report.holding:
            self._observer(
                "messaging.held_back",
                stream=stream,
                group=each.group,
                entries=each.holds_back,
                idle_ms=each.idle_ms,
                dead=each.dead,
            )
        for each in report.dead_groups:
            silent = "it has no consumer" if each.idle_ms is None else f"silent for {each.idle_ms // 1000} s"
            if (stream, each.group) in self._named:  # once is loud enough for a log; observers hear it every time
                continue
            log.warning(
                "group %r of %r looks dead (%s) and holds back %d entries or more, from %s on. Delete or revive it.",
                *(each.group, stream, silent, each.holds_back, each.oldest_needed),
            )
        self._named = {pair for pair in self._named if pair[0] != stream}
        self._named |= {(stream, each.group) for each in report.dead_groups}


def _is_glob(name: str) -> bool:
    return any(sign in name for sign in "*?[")


def _parse_count(text: str, argument: str) -> int:
    if not text.isdecimal():
        raise InvalidArgument(argument, text, "a whole number that is not negative")
    return int(text)
