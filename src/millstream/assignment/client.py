"""The public client of a service: the loops of a member, and its bounded queue of notifications."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any
from weakref import ref

from millstream.assignment.announcement import Announcement, add_announcements, balancer_stream, is_lock
from millstream.assignment.errors import MemberClosed
from millstream.assignment.leases import FencingToken
from millstream.assignment.member import AssignmentMember
from millstream.assignment.membership import Settings, default_member
from millstream.assignment.notifications import Notification, Notifications, StreamAdded, StreamDisowned, StreamExpired
from millstream.assignment.ownership import (
    BeforeRelease,
    ChooseReleases,
    release_at_once,
    release_last_taken,
)
from millstream.broker import BlockingBroker, Broker
from millstream.errors import AuthenticationFailed, InvalidArgument, MillstreamError, PermissionDenied
from millstream.messaging.consumer.blocked_loop import LoopWatch
from millstream.messaging.consumer.subscription import CLOSE_REQUEST_S, LAST_REPLY_S
from millstream.model import Backoff, EntryId, Observer
from millstream.model.policies import guarded

log = logging.getLogger(__name__)

PAUSES = Backoff(initial_ms=250, max_ms=5_000)
"""Between attempts of steps that have failed and are not urgent."""


class MemberWatch(LoopWatch):
    """Extends the row and the Go locks of a member from a thread while a handler blocks the event loop."""

    def __init__(self, member: AssignmentMember) -> None:
        super().__init__()
        self._member = ref(member)
        self.renew_every(member.settings.renew_interval_ms / 1000)

    def connect(self) -> BlockingBroker | None:
        member = self._member()
        # A test double may have no servers to connect to.
        connect = None if member is None else getattr(member.broker.transport, "blocking", None)
        return None if connect is None or member is None else BlockingBroker(connect(), member.broker.context)

    def renew(self, broker: BlockingBroker) -> None:
        member = self._member()
        if member is None or not member.view.now_ms:
            return  # it has not joined yet
        member.renew_in_thread(broker)
        if self.stopped:
            member.leave_in_thread(broker)


class AssignmentClient:
    """A member of a service: ``async for notification in client.start()`` until ``close()``.

    Announced streams are distributed evenly over the members, up to the capacity of each. Heartbeats extend the leases
    of a member. If it sends none for ``lease_ms``, other members take its streams over. Observer events go to
    ``observer`` (default: that of the broker).
    """

    def __init__(
        self,
        broker: Broker,
        service: str,
        *,
        member: str | None = None,
        settings: Settings | None = None,
        observer: Observer | None = None,
        before_release: BeforeRelease = release_at_once,
        choose_releases: ChooseReleases = release_last_taken,
        accepts: Callable[[str], bool] | None = None,
    ) -> None:
        """``accepts``: whether this member may own an announced stream; it does not take the leases of other
        streams. ``choose_releases``: which streams are handed over to other members, and when."""
        self.settings = settings or Settings()
        self._broker = broker
        self._service = service
        observer = broker.context.observer if observer is None else guarded(observer)
        self._notifications = Notifications()
        self._steps = AssignmentMember(
            broker, service, default_member() if member is None else member, self.settings, self._notify, observer
        )
        self._steps.before_release = before_release
        self._steps.choose_releases = choose_releases
        self._steps.accepts = accepts
        self._emit = partial(observer, service=service, member=self._steps.name)
        self._tasks: list[asyncio.Task[None]] = []
        self._listening: asyncio.Task[None] | None = None
        self._watch: MemberWatch | None = None
        self._closed = False
        self._joined = False
        self._stop = asyncio.Event()
        self._place_now = asyncio.Event()
        self._changes = asyncio.Lock()
        self._heartbeat_at_ms = 0.0
        self._started_at = 0.0
        self._settled = False
        """The first placement has ended: each stream that had no owner at the start has one."""

    @property
    def id(self) -> str:
        return self._steps.name

    @property
    def joined(self) -> bool:
        """Whether this member has joined the service at least once."""
        return self._joined

    @property
    def owned(self) -> dict[str, FencingToken]:
        """The streams that this member owns, as far as it knows."""
        return {stream: lease.token for stream, lease in self._steps.owned.items()}

    @property
    def malformed(self) -> frozenset[str]:
        """Announced streams that no member can own, because their owner records are malformed."""
        return frozenset(self._steps.malformed)

    @property
    def ready(self) -> bool:
        """Whether the last heartbeat is younger than the lease. A member that is not ready may have lost streams."""
        loop = asyncio.get_running_loop()
        return (
            bool(self._tasks)
            and not self._closed
            and loop.time() * 1000 - self._heartbeat_at_ms < self.settings.lease_ms
        )

    def certain_until(self, token: FencingToken) -> float:
        """Until when (``time.monotonic`` seconds) no other member can own the stream of the token; 0 if not certain.

        Start no work later: after a pause that is longer than the lease, other members own the streams.
        """
        return self._steps.certain_until(token)

    def hand_over_soon(self) -> None:
        """A stream that exceeds this member's share is not in use any more: it need not wait for the next scan."""
        self._place_now.set()

    # --- start and close ---

    def start(self) -> Notifications:
        """Joins the service and returns the notifications. They end after ``close()``, when all were received.

        A permanent error (a wrong password, no permission, a key of another type) is raised by ``await client.start()``
        or by the iterator. Other errors are logged, and the step is repeated.
        """
        if self._tasks or self._closed:
            raise MemberClosed("this member was started or closed before. Create a new AssignmentClient.")
        self._started_at = asyncio.get_running_loop().time()
        self._watch = MemberWatch(self._steps)
        self._watch.start()
        self._tasks = [
            # Without the lock: while other steps wait, the row of this member must still be extended.
            asyncio.create_task(self._repeat(self._heartbeat, self.settings.renew_interval_ms, self._stop)),
            asyncio.create_task(self._repeat(self._renew_step, self.settings.renew_interval_ms, self._stop)),
            asyncio.create_task(
                self._repeat(self._place_step, self.settings.sweep_interval_ms, self._place_now, backs_off=True)
            ),
        ]
        self._listening = asyncio.create_task(
            self._repeat(self._listen, self.settings.renew_interval_ms, self._stop, backs_off=True)
        )
        return self._notifications

    def retire(self) -> None:
        """From now on this member takes no streams, and hands its streams over as ``choose_releases`` says. ``close``
        follows."""
        self._steps.retiring = True
        self._place_now.set()

    async def close(self) -> None:
        """Releases every stream at once, unfinished, and leaves the service.

        Queued notifications can still be received: the iterator ends after the last one, and
        ``await notifications.join()`` waits until all of them are handled. If the server
        cannot be reached, this waits for half a lease and CLOSE_REQUEST_S at most, and raises nothing: the leases
        expire.
        """
        if self._closed:
            return
        self._closed = True
        # The loops end by themselves: a cancelled step could leave leases that have to expire.
        self._stop.set()
        self._place_now.set()
        if self._listening is not None:
            self._listening.cancel()
            self._tasks.append(self._listening)
        leaving = asyncio.create_task(self._leave(), name=f"millstream member {self.id} leaves")
        try:
            await asyncio.wait([leaving], timeout=CLOSE_REQUEST_S + self.settings.lease_ms / 2000)
        finally:
            unfinished = [task for task in (leaving, *self._tasks) if not task.done()]
            for task in unfinished:
                task.cancel()
            if unfinished:
                await asyncio.wait(unfinished, timeout=LAST_REPLY_S)
            if self._watch is not None:
                self._watch.stop()
            self._notifications.close()
        error = None if not leaving.done() or leaving.cancelled() else leaving.exception()
        if unfinished or isinstance(error, MillstreamError):
            log.warning(
                "member %r could not release its streams; they are free when its leases expire: %s",
                *(self.id, error or "the server does not reply"),
            )
        elif error is not None:
            raise error

    async def _leave(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)
        async with self._changes:
            if self._watch is not None:
                self._watch.stop()
            if self._joined:
                await self._steps.leave()

    async def announce(self, stream: str, info: Mapping[str, Any] | None = None) -> EntryId:
        """Announces ``stream``, so that a member takes it. Processes that are not members may announce too."""
        return await announce(self._broker, self._service, stream, info)

    async def claim(self, expired: StreamExpired) -> StreamAdded:
        """Takes over a stream whose lease has expired. Raises StreamIsOwned if another member was faster.

        Raises MemberClosed after ``close``: the lease would have no owner that renews it.
        """
        async with self._changes:
            if self._closed:
                raise MemberClosed("this member is closed and can claim no stream. Create a new AssignmentClient.")
            return await self._steps.claim(expired.stream, expired.lbs_id)

    async def finish(self, stream: str) -> None:
        """Ends the stream: it is no longer announced. Raises NotTheOwner, and changes nothing, if it is not owned."""
        async with self._changes:
            await self._steps.finish(stream)

    async def release(self, stream: str) -> None:
        """Releases the stream, unfinished, for another member."""
        async with self._changes:
            await self._steps.release(stream)

    # --- the loops ---

    async def _repeat(
        self, step: Callable[[], Awaitable[None]], interval_ms: int, wake: asyncio.Event, *, backs_off: bool = False
    ) -> None:
        """Runs the step in intervals; a failure is logged, and the step is repeated. ``wake`` ends an interval early.
        With ``backs_off`` intervals grow while the step fails; heartbeats and renewals keep theirs."""
        failures = 0
        while not self._stop.is_set():
            try:
                await step()
                failures = 0
            except Exception as error:  # of any kind: otherwise a member would stop renewing or placing without notice
                failures += 1
                if isinstance(error, MillstreamError) and self._is_permanent(error):
                    self._give_up(error)
                    return
                if isinstance(error, MillstreamError):
                    log.log(logging.WARNING if failures == 1 else logging.DEBUG, "member %r: %s", self.id, error)
                else:
                    log.exception("member %r: %s failed", self.id, step.__name__)
                self._emit("assignment.step_failed", step=step.__name__, error=str(error))
            chance = random.random()  # noqa: S311 (jitter, not a secret)
            pause_ms = max(interval_ms, PAUSES.delay_ms(failures, chance)) if backs_off and failures else interval_ms
            try:
                async with asyncio.timeout(pause_ms / 1000):
                    await wake.wait()
            except TimeoutError:
                pass

    def _is_permanent(self, error: MillstreamError) -> bool:
        """Whether the error ends this member. After the first placement it does not: an operator may correct a
        password or an ACL rule, and the member owns streams."""
        if isinstance(error, (AuthenticationFailed, PermissionDenied)):
            return not self._settled
        return not self._joined and not error.retryable

    def _give_up(self, error: MillstreamError) -> None:
        """Ends this member: the iterator raises the error."""
        self._notifications.fail(error)
        self._stop.set()
        self._place_now.set()

    async def _listen(self) -> None:
        """Starts a scan when the server reports an expired lock. Keyspace events are optional: scans run anyway."""
        separators = self.settings.go_lock_separators
        try:
            async for _, key in self._broker.listen("__keyevent@*__:expired"):
                if is_lock(key, separators):
                    self._place_now.set()
        except MillstreamError as error:
            if error.retryable:
                raise
            log.info("member %r receives no keyspace events and relies on periodic scans: %s", self.id, error)
            await self._stop.wait()

    async def _renew_step(self) -> None:
        async with self._changes:
            await self._heartbeat()
            await self._steps.renew()
            await self._steps.forget_consumers()

    async def _place_step(self) -> None:
        # Cleared only here: if close() sets it while the step runs, the loop must notice that after the step.
        self._place_now.clear()
        has_more = True
        while has_more and not self._closed:
            async with self._changes:
                await self._heartbeat()
                if self.settings.takeover == "notify":
                    await self._steps.notify_expired(self.settings.queue_size - len(self._notifications))
                has_more = await self._steps.place(self.settings.queue_size - len(self._notifications))
            await asyncio.sleep(0)
        if not self._settled:
            self._settled = True
            self._notifications.begin()
            took = asyncio.get_running_loop().time() - self._started_at
            self._emit("assignment.started", streams=len(self._steps.owned), seconds=took)

    async def _heartbeat(self) -> None:
        if not self._joined:
            await self._steps.join()
        await self._steps.heartbeat()
        self._joined = True
        self._heartbeat_at_ms = asyncio.get_running_loop().time() * 1000

    # --- the queue ---

    def _notify(self, notification: Notification) -> None:
        """Queues a notification. The queue is bounded although none is dropped: a member takes no stream while it is
        full, and disowns only streams that it owns."""
        self._notifications.put(notification)
        self._emit("assignment.notification", kind=type(notification).__name__)
        if isinstance(notification, StreamDisowned):
            log.info("member %r no longer owns %r", self.id, notification.stream)


async def announce(broker: Broker, service: str, stream: str, info: Mapping[str, Any] | None = None) -> EntryId:
    """Announces a data stream on a service's load-balancer stream."""
    if not service:
        raise InvalidArgument("service", service, "a name that is not empty")
    [lbs_id] = await broker.run(add_announcements, balancer_stream(service), [Announcement(stream, info or {})])
    return lbs_id
