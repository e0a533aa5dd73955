"""The loops around a member's steps, and the one bounded queue through which it is told what happens."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from millstream.assignment.announcement import Announcement, balancer_stream, is_lock
from millstream.assignment.errors import MemberClosed
from millstream.assignment.leases import Token
from millstream.assignment.member import AssignmentMember
from millstream.assignment.membership import Settings, default_member
from millstream.assignment.notifications import Notification, Notifications, StreamAdded, StreamDisowned, StreamExpired
from millstream.assignment.ownership import BeforeRelease, release_at_once
from millstream.broker import Broker
from millstream.errors import AuthenticationFailed, InvalidArgument, MillstreamError, PermissionDenied
from millstream.model import Backoff, EntryId, Observer

log = logging.getLogger(__name__)

PAUSES = Backoff(initial_ms=250, max_ms=5_000)
"""Between tries of what has failed and can wait."""


class AssignmentClient:
    """A member of a service. ``async for notification in client.start()`` until ``close()``. Facts go to the broker's
    observer, unless another is given.

    Streams that were announced are placed evenly over the members, up to each one's capacity. A lease is held by
    heartbeats; when a member falls silent for ``lease_ms``, the others take its streams over.
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
    ) -> None:
        self.settings = settings or Settings()
        self._broker = broker
        self._service = service
        observer = observer or broker.context.observer
        self._notifications = Notifications()
        self._steps = AssignmentMember(
            broker, service, default_member() if member is None else member, self.settings, self._emit, observer
        )
        self._steps.before_release = before_release
        self._tell = partial(observer, service=service, member=self._steps.name)
        self._tasks: list[asyncio.Task[None]] = []
        self._listening: asyncio.Task[None] | None = None
        self._closed = False
        self._joined = False
        self._stop = asyncio.Event()
        self._look_now = asyncio.Event()
        self._changes = asyncio.Lock()
        self._heartbeat_at_ms = 0.0
        self._started_at = 0.0
        self._settled = False
        """The first placing was done: whatever was waiting for an owner when this member came is taken, or others'."""

    @property
    def id(self) -> str:
        return self._steps.name

    @property
    def joined(self) -> bool:
        """Whether the service ever heard of this member."""
        return self._joined

    @property
    def owned(self) -> dict[str, Token]:
        """What this member owns now, as far as it knows."""
        return {stream: lease.token for stream, lease in self._steps.owned.items()}

    @property
    def ready(self) -> bool:
        """Whether the last heartbeat was heard within the lease: a member that is not ready may have lost streams."""
        loop = asyncio.get_running_loop()
        return (
            bool(self._tasks)
            and not self._closed
            and loop.time() * 1000 - self._heartbeat_at_ms < self.settings.lease_ms
        )

    def certain_until(self, token: Token) -> float:
        """Until then (as ``time.monotonic`` counts) nobody else can own the token's stream; 0 where that is not sure.

        Begin nothing later: a member that was stopped past its lease finds its streams with others."""
        return self._steps.certain_until(token)

    # --- the walk of a member's life ---

    def start(self) -> Notifications:
        """Joins, and gives the notifications. Ends after ``close()``, when all of them have been taken.

        An error that will not pass (wrong password, no permission, another type under the stream's name) is raised by
        ``await client.start()``, or to whoever iterates; what may pass is told, and tried again.
        """
        if self._tasks or self._closed:
            raise MemberClosed("this member was started or closed before. Make a new AssignmentClient.")
        self._started_at = asyncio.get_running_loop().time()
        self._tasks = [
            # By itself, behind no lock: whatever the other steps wait for, the others must know that this one lives.
            asyncio.create_task(self._repeat(self._heartbeat, self.settings.renew_interval_ms, self._stop)),
            asyncio.create_task(self._repeat(self._renew_step, self.settings.renew_interval_ms, self._stop)),
            asyncio.create_task(
                self._repeat(self._place_step, self.settings.sweep_interval_ms, self._look_now, calm=True)
            ),
        ]
        self._listening = asyncio.create_task(
            self._repeat(self._listen, self.settings.renew_interval_ms, self._stop, calm=True)
        )
        return self._notifications

    async def close(self) -> None:
        """Hands every stream back at once, unfinished, and leaves. The iterator ends when it is drained."""
        if self._closed:
            return
        self._closed = True
        # The loops end by themselves: a step that is cut in the middle would leave leases that have to time out.
        self._stop.set()
        self._look_now.set()
        if self._listening is not None:
            self._listening.cancel()
            self._tasks.append(self._listening)
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
            async with self._changes:
                if self._joined:
                    await self._steps.leave()
        finally:
            self._notifications.close()

    async def announce(self, stream: str, info: Mapping[str, Any] | None = None) -> EntryId:
        """Asks for an owner of ``stream``. Any process may, a member or not."""
        return await announce(self._broker, self._service, stream, info)

    async def claim(self, what: StreamExpired) -> StreamAdded:
        """Takes over a stream whose lease has run out; StreamIsOwned where another was quicker."""
        async with self._changes:
            return await self._steps.claim(what.stream, what.lbs_id)

    async def finish(self, stream: str) -> None:
        """The stream's work is done: it is announced no more. NotTheOwner, and nothing changed, if it is not owned."""
        async with self._changes:
            await self._steps.finish(stream)

    async def release(self, stream: str) -> None:
        """Gives the stream back, unfinished, for another member."""
        async with self._changes:
            await self._steps.release(stream)

    # --- the loops ---

    async def _repeat(
        self, step: Callable[[], Awaitable[None]], interval_ms: int, sooner: asyncio.Event, *, calm: bool = False
    ) -> None:
        """A failing step is told and tried again: the server may be away for a while. ``sooner`` cuts a rest; a
        ``calm`` step rests longer the oftener it fails, while heartbeats and renewals keep their pace."""
        failures = 0
        while not self._stop.is_set():
            try:
                await step()
                failures = 0
            except Exception as error:
                failures += 1
                if isinstance(error, MillstreamError) and self._is_for_good(error):
                    self._give_up(error)
                    return
                # Whatever it was: a member that stops renewing or placing, and says nothing, is the worst of all.
                if isinstance(error, MillstreamError):
                    log.log(logging.WARNING if failures == 1 else logging.DEBUG, "member %r: %s", self.id, error)
                else:
                    log.exception("member %r: %s failed", self.id, step.__name__)
                self._tell("assignment.step_failed", step=step.__name__, error=str(error))
            chance = random.random()  # noqa: S311 (jitter, not a secret)
            pause_ms = max(interval_ms, PAUSES.delay_ms(failures, chance)) if calm and failures else interval_ms
            try:
                async with asyncio.timeout(pause_ms / 1000):
                    await sooner.wait()
            except TimeoutError:
                pass

    def _is_for_good(self, error: MillstreamError) -> bool:
        """Whether a member that has not placed anything yet never will. Later on, whatever it is may be mended again
        (a password that is changed, a rule): its streams are worth the wait."""
        if isinstance(error, (AuthenticationFailed, PermissionDenied)):
            return not self._settled
        return not self._joined and not error.retryable

    def _give_up(self, error: MillstreamError) -> None:
        """Nobody would ever hear anything from this member but this error."""
        self._notifications.fail(error)
        self._stop.set()
        self._look_now.set()

    async def _listen(self) -> None:
        """Where the server tells of expired keys, a lock that has run out is looked at now; nothing depends on it."""
        separators = self.settings.go_lock_separators
        try:
            async for _, key in self._broker.listen("__keyevent@*__:expired"):
                if is_lock(key, separators):
                    self._look_now.set()
        except MillstreamError as error:
            if error.retryable:
                raise
            log.info("member %r goes by its sweeps alone: %s", self.id, error)
            await self._stop.wait()

    async def _renew_step(self) -> None:
        async with self._changes:
            await self._heartbeat()
            await self._steps.renew()
            await self._steps.forget_consumers()

    async def _place_step(self) -> None:
        # Here and nowhere else: a call that comes while the step runs, close()'s above all, must be found after it.
        self._look_now.clear()
        more = True
        while more and not self._closed:
            async with self._changes:
                await self._heartbeat()
                if self.settings.takeover == "notify":
                    await self._steps.tell_expired(self.settings.queue_size - len(self._notifications))
                more = await self._steps.place(self.settings.queue_size - len(self._notifications))
            await asyncio.sleep(0)
        if not self._settled:
            self._settled = True
            self._notifications.begin()
            took = asyncio.get_running_loop().time() - self._started_at
            self._tell("assignment.started", streams=len(self._steps.owned), seconds=took)

    async def _heartbeat(self) -> None:
        if not self._joined:
            await self._steps.join()
        await self._steps.heartbeat()
        self._joined = True
        self._heartbeat_at_ms = asyncio.get_running_loop().time() * 1000

    # --- the queue ---

    def _emit(self, notification: Notification) -> None:
        """Bounded without dropping: taking stops while the queue is full, and only what is owned can be disowned."""
        self._notifications.put(notification)
        self._tell("assignment.notification", kind=type(notification).__name__)
        if isinstance(notification, StreamDisowned):
            log.info("member %r does not own %r any more", self.id, notification.stream)


async def announce(broker: Broker, service: str, stream: str, info: Mapping[str, Any] | None = None) -> EntryId:
    """Announces a data stream on a service's load-balancer stream."""
    if not service:
        raise InvalidArgument("service", service, "a name that is not empty")
    return await broker.xadd(balancer_stream(service), Announcement(stream, info or {}).fields())
