"""Retention in the workers: applies the policies that a router's routes declare.

Every worker declares its policies next to the streams. For each stream one worker of the fleet holds a lease and
applies the policy; each of its steps compares the lease and what groups need in the same atomic step that deletes. If
the holder dies, another worker takes the lease when it expires; if it was paused, its next step is refused.

Entries are kept whenever deletion could be wrong: while live workers declare different policies for the stream, while a
declared group does not exist, and while the stream has no group (``delete_acked``).
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from millstream.broker.keys import can_have_companions
from millstream.broker.scripts import retention
from millstream.broker.scripts.script import Fence
from millstream.errors import BrokerClosed, BrokerUnavailable, MillstreamError, StaleOwner
from millstream.messaging.failure import text_of
from millstream.messaging.partitions import partition_streams
from millstream.messaging.retention import (
    DEAD_AFTER_MS,
    DEAD_LETTERS,
    DELETE_ACKED,
    KEEP,
    PolicyRunner,
    RetentionPolicy,
    is_load_balancer,
    policy_of,
)
from millstream.messaging.settings import default_consumer
from millstream.model import monotonic_ms
from millstream.wire import to_bytes

if TYPE_CHECKING:
    from millstream.broker import BrokerProtocol
    from millstream.messaging.route import Route

log = logging.getLogger("millstream.retention")

KEEP_ALL = "keep everything"
"""How a policy is described that was given as ``keep=None``."""
WITHDRAW_TIMEOUT_S = 2.0
"""How long a router that closes waits for its declarations to be removed. The others expire."""
MAX_CALLS_PER_PASS = 50
"""The ``delete_acked`` operations on one stream before the next stream has its turn."""
STREAMS_PER_SIZE_CHECK = 100
LARGE_STREAM_ENTRIES = 1_000_000
LARGE_STREAM_BYTES = 512 * 1024 * 1024
"""A stream without a policy that is larger than either is logged, once per process."""


class Pace(NamedTuple):
    """How often the parts of housekeeping run. A worker with many streams does each of them less often."""

    declare_ms: int = 10_000
    """Declarations are renewed, and limits applied, this often. A lease lasts three times as long."""
    delete_ms: int = 1_000
    """Acknowledged entries are deleted this often."""
    sizes_ms: int = 60_000
    """The sizes of streams without a policy are read this often."""


PACE = Pace()
LEASE_INTERVALS = 3
DECLARED_INTERVALS = 6
MS_PER_STREAM = 5
"""The minimum interval per stream: with 2,000 streams the intervals are those above."""


class ContradictingPolicies(MillstreamError):
    """Two handlers of a router declare different retention policies for one stream. ``places`` names both."""

    places: tuple[str, str]

    def __init__(self, stream: str, first: tuple[str, str], second: tuple[str, str]) -> None:
        super().__init__(
            f"{first[0]} and {second[0]} have different retention policies for {stream!r}: {first[1]}, and "
            f"{second[1]}. Give both the same policy, or only one of them a policy.",
            stream=stream,
            places=(first[0], second[0]),
        )


@dataclass(slots=True)
class KeptStream:
    """A stream with a policy: what this worker declares, and what it knows of the stream."""

    name: str
    policy: RetentionPolicy
    place: str
    groups: list[str] = field(default_factory=list)
    lease: Fence | None = None
    cursor: bytes = b""
    """Where the next deletion of acknowledged entries continues."""
    may_delete: bool = False
    """Whether this worker holds the lease, and nothing forbids deletion."""
    logged: set[str] = field(default_factory=set)
    """Conditions that were logged already; each is removed when it ends."""


def streams_of(route: Route) -> list[str]:
    return [route.topic] if route.partitions is None else partition_streams(route.topic, route.partitions)


def kept_streams(routes: Sequence[Route]) -> dict[str, KeptStream]:
    """The streams with a policy. Raises ContradictingPolicies, also for an explicit ``keep=None`` and for a handler
    without a group whose entries another handler's ``delete_acked`` would delete."""
    dead_letters = {route.options["dlq"] for route in routes if route.options.get("dlq")}
    streams: dict[str, KeptStream] = {}
    stated: dict[str, tuple[str, str]] = {}
    for route in routes:
        policy = policy_of(route.options)
        if policy is None and KEEP not in route.options:
            continue
        for stream in streams_of(route):
            if policy is not None and (stream.endswith(DEAD_LETTERS) or stream in dead_letters):
                log.warning("the retention policy of %s is not applied: %r holds dead letters", route.place, stream)
                continue
            statement = (route.place, KEEP_ALL if policy is None else str(policy))
            first = stated.setdefault(stream, statement)
            if first[1] != statement[1]:
                raise ContradictingPolicies(stream, first, statement)
            if policy is not None:
                streams.setdefault(stream, KeptStream(stream, policy, route.place))
    for route in routes:
        for stream in streams_of(route):
            if (known := streams.get(stream)) is None:
                continue
            if route.group is not None:
                known.groups.append(route.group)
            elif known.policy.delete_acked:
                broadcast = (route.place, "reads without a group, so nothing says what it has read")
                raise ContradictingPolicies(stream, (known.place, str(known.policy)), broadcast)
    return streams


class Housekeeper:
    """Applies the policies of a router's routes, and reports large streams without a policy."""

    def __init__(self, broker: BrokerProtocol, routes: Sequence[Route], *, pace: Pace | None = None) -> None:
        pace = pace or PACE
        self._broker = broker
        self._observer = broker.context.observer
        self._kept = kept_streams(routes)
        self._runner = PolicyRunner(broker, self._observer, DEAD_AFTER_MS)
        self._worker = f"{default_consumer()}-{os.urandom(4).hex()}"
        # Streams of a broker that trims them need no policy.
        unbounded = broker.context.max_stream_len is None
        self._others = [name for name in _names(routes) if unbounded and name not in self._kept]
        self._next_size_check = 0
        self._broadcasts = [route for route in routes if route.group is None and route.topic not in self._kept]
        self._logged: set[str] = set()
        slow = MS_PER_STREAM * len(self._kept)
        self._declare_ms = max(pace.declare_ms, slow)
        self._delete_ms = max(pace.delete_ms, slow) if self._deletes_acked else self._declare_ms
        self._sizes_ms = pace.sizes_ms

    @property
    def kept(self) -> Mapping[str, KeptStream]:
        return self._kept

    @property
    def _deletes_acked(self) -> bool:
        return any(stream.policy.delete_acked for stream in self._kept.values())

    async def run(self) -> None:
        """Runs until it is cancelled; then removes its declarations. After another error they stay: without them, a
        worker with a different policy could delete entries before this one runs again."""
        if not self._kept and not self._others and not self._broadcasts:
            return
        declare_at = delete_at = monotonic_ms()
        sizes_at = declare_at + self._sizes_ms
        try:
            while True:
                now = monotonic_ms()
                if self._kept and now >= declare_at:
                    declare_at = now + self._declare_ms
                    await self._for_each_stream(self._declare)
                    delete_at = monotonic_ms() + self._delete_ms
                elif self._kept and now >= delete_at:
                    await self._for_each_stream(self._delete)
                    delete_at = monotonic_ms() + self._delete_ms
                elif now >= sizes_at:
                    await self._check_others()
                    sizes_at = monotonic_ms() + self._sizes_ms
                due = min(declare_at, delete_at, sizes_at) if self._kept else sizes_at
                await asyncio.sleep(max(0, due - monotonic_ms()) / 1000)
        except BrokerClosed:
            return
        except asyncio.CancelledError:
            await self._withdraw()
            raise

    async def _withdraw(self) -> None:
        """Removes the declarations of this worker. Those that remain expire."""
        try:
            async with asyncio.timeout(WITHDRAW_TIMEOUT_S):
                for name in self._kept:
                    await self._broker.run(retention.withdraw, name, self._worker)
        except (MillstreamError, TimeoutError) as error:
            log.debug("the retention policies of this worker expire by themselves: %s", error)

    async def _for_each_stream(self, step: Any) -> None:
        """One step for every stream. A stream that fails costs the others nothing, nor does a node of a Cluster."""
        node_of = self._broker.context.node_of
        nodes: dict[Any, list[KeptStream]] = {}
        for stream in self._kept.values():
            nodes.setdefault(None if node_of is None else node_of(to_bytes(stream.name)), []).append(stream)
        # Not gather: if the broker is closed, the tasks of the other nodes must stop.
        try:
            async with asyncio.TaskGroup() as group:
                for streams in nodes.values():
                    group.create_task(self._each_of_node(step, streams))
        except* BrokerClosed as closed:
            raise closed.exceptions[0] from None

    async def _each_of_node(self, step: Any, streams: Sequence[KeptStream]) -> None:
        for place, stream in enumerate(streams):
            try:
                await step(stream)
            except BrokerClosed:
                raise
            except BrokerUnavailable as error:
                # Each further stream of this node would wait for the deadline too: they are tried in the next pass.
                for other in streams[place:]:
                    other.may_delete = False
                # If only this stream is unavailable (its slot is moved), the next pass must reach the streams after it.
                self._kept[stream.name] = self._kept.pop(stream.name)
                self._report_failure(stream, error)
                return
            except StaleOwner:
                stream.may_delete, stream.lease = False, None
                log.info("the lease for the retention of %r was lost", stream.name)
            except Exception as error:  # of any kind: it must not cost the other streams their turn
                stream.may_delete = False
                self._report_failure(stream, error)

    def _report_failure(self, stream: KeptStream, error: Exception) -> None:
        self._observer("messaging.retention_failed", stream=stream.name, error=text_of(error))
        if self._is_news(stream, "failed"):
            foreseen = isinstance(error, MillstreamError)
            log.warning("retention of %r failed: %s", stream.name, error, exc_info=not foreseen)

    async def _declare(self, stream: KeptStream) -> None:
        """Declares the policy, takes or renews the lease, and applies the limits if this worker holds it."""
        stream.may_delete = False
        if await is_load_balancer(self._broker, stream.name):
            if self._is_news(stream, "announcements"):
                log.warning("the policy of %s is not applied: %r announces streams", stream.place, stream.name)
            return
        declared = await self._broker.run(
            retention.declare,
            *(stream.name, self._worker, str(stream.policy)),
            groups=stream.groups,
            declared_ms=self._declare_ms * DECLARED_INTERVALS,
            lease_ms=self._declare_ms * LEASE_INTERVALS,
        )
        if declared.lease is not None and stream.lease is None:
            log.info("this worker applies the retention policy of %r: %s", stream.name, stream.policy)
        stream.lease = declared.lease
        stream.logged.discard("failed")
        self._report_conflicts(stream, declared.others)
        if declared.lease is None or declared.others or declared.missing:
            return
        stream.may_delete = True
        await self._runner.apply(stream.name, stream.policy, fence=declared.lease)

    def _report_conflicts(self, stream: KeptStream, others: Sequence[tuple[str, str]]) -> None:
        if not others:
            stream.logged = {text for text in stream.logged if not text.startswith("conflict")}
        for worker, policy in others:
            self._observer(
                "messaging.retention_conflict",
                stream=stream.name,
                policy=str(stream.policy),
                other_policy=policy,
                other_worker=worker,
            )
            if self._is_news(stream, f"conflict {policy}"):
                log.warning(
                    "%s declares the retention policy %s for %r, and worker %s declares %s. "
                    "Nothing is deleted until they agree: give both the same policy.",
                    *(stream.place, stream.policy, stream.name, worker, policy),
                )

    async def _delete(self, stream: KeptStream) -> None:
        if not stream.may_delete or not stream.policy.delete_acked:
            return
        deleted = 0
        for _ in range(MAX_CALLS_PER_PASS):
            done = await self._runner.delete_acked(stream.name, stream.cursor, fence=stream.lease)
            deleted, stream.cursor = deleted + done.deleted, done.cursor
            if not done.deleted or not done.cursor:
                break
        if deleted:
            self._observer("messaging.trimmed", stream=stream.name, dropped=deleted, length=done.length)

    async def _check_others(self) -> None:
        """Reports streams without a policy that are large, and broadcasts whose entries another worker deletes."""
        begin = self._next_size_check
        names = self._others[begin : begin + STREAMS_PER_SIZE_CHECK]
        self._next_size_check = begin + len(names) if begin + len(names) < len(self._others) else 0
        try:
            for size in await self._broker.run(retention.sizes_without_policy, names):
                if size.length >= LARGE_STREAM_ENTRIES or size.memory_bytes >= LARGE_STREAM_BYTES:
                    self._report_large(size)
            for route in self._broadcasts:
                for worker, policy in (await self._broker.run(retention.policies, route.topic)).items():
                    if DELETE_ACKED in policy.split() and route.topic not in self._logged:
                        self._logged.add(route.topic)
                        log.warning(
                            "worker %s deletes entries of %r once all groups have acknowledged them, and %s reads it "
                            "without a group: it may miss entries. Give it a group, or delete by age.",
                            *(worker, route.topic, route.place),
                        )
        except BrokerClosed:
            raise
        except MillstreamError as error:
            log.debug("the sizes of streams without a retention policy were not read: %s", error)

    def _report_large(self, size: retention.StreamSize) -> None:
        self._observer("messaging.large_stream", stream=size.stream, length=size.length, memory_bytes=size.memory_bytes)
        if size.stream not in self._logged:
            self._logged.add(size.stream)
            log.warning(
                "%r has %d entries (%d bytes) and no worker declares a retention policy for it. "
                "Pass keep= or delete_acked= to its handler, or run millstream retention.",
                *(size.stream, size.length, size.memory_bytes),
            )

    @staticmethod
    def _is_news(stream: KeptStream, text: str) -> bool:
        if text in stream.logged:
            return False
        stream.logged.add(text)
        return True


def _names(routes: Sequence[Route]) -> list[str]:
    names = dict.fromkeys(name for route in routes for name in streams_of(route))
    return [name for name in names if can_have_companions(to_bytes(name)) and not name.endswith(DEAD_LETTERS)]
