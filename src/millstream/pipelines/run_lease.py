"""The lease of a run: one process at a time works with a checkpoint, and a process that lost its lease commits nothing.

The lease is kept in the Redis of the pipeline's first required Redis sink (else of its Redis source), in two keys that
are named after the checkpoint's application id:

{pipeline:<application>}.owner     the fencing token: a number and the holder; a week after its last renewal it expires
{pipeline:<application>}.running   exists while the holder renews it; another process may take over when it has expired

Only the server's expiry of the second key counts, so the clocks of the processes do not matter. Losing the second key
alone, as in an outage that is longer than the lease, costs nothing: the holder writes it again unless the first key
names another holder. A pipeline without such a Redis has only the lock on its checkpoint directory.

Decision 20 lists what a process that lost its lease can and cannot write, and why.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millstream.broker import Fence, companion_key
from millstream.broker.scripts.leases import (
    limit_locks,
    lock_keys,
    read_leases,
    release_leases,
    renew_leases,
    take_leases,
    unlock_keys,
)
from millstream.broker.scripts.leases.call import OWNER_TTL_MS
from millstream.errors import BrokerUnavailable, MillstreamError, OutOfMemory, ReadOnlyReplica, ServerLoading
from millstream.pipelines.checkpoint import Checkpoint
from millstream.pipelines.errors import CheckpointLocked, LeaseLost, LeaseUnverified, StopRequested, short
from millstream.pipelines.plan import PipelinePlan
from millstream.pipelines.redis_address import RedisAddress
from millstream.storage import StorageUnavailable

if TYPE_CHECKING:
    from millstream.broker import BlockingBroker

log = logging.getLogger("millstream.pipelines")

LEASE_S = 15.0
"""How long a lease lasts without a renewal."""
_RENEWALS_PER_LEASE = 4
_RETRY_S = 0.2
TRANSIENT = (BrokerUnavailable, ServerLoading, ReadOnlyReplica, OutOfMemory, StorageUnavailable)
"""Errors of Redis, and of the checkpoint's store, after which the lease is tried again."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that runs a pipeline. ``since`` is in its own clock, for people only: no decision depends on it."""

    host: str
    process: int
    since: str
    nonce: str = ""
    boot: str = ""
    namespace: int = 0
    began: int | None = None

    @classmethod
    def this_process(cls) -> Holder:
        return cls(
            socket.gethostname(),
            os.getpid(),
            datetime.now(UTC).isoformat(timespec="seconds"),
            secrets.token_hex(8),
            _boot_id(),
            _pid_namespace(),
            _start_time(os.getpid()),
        )

    @classmethod
    def parse(cls, record: bytes | None) -> Holder | None:
        """Return the holder that an owner record names; None after a release, or if there is no record."""
        _, _, member = (record or b"").partition(b" ")
        if not member:
            return None
        try:
            return cls(**json.loads(member))
        except (ValueError, TypeError):
            return cls("unknown", 0, "an unknown time")

    def text(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    def is_dead(self) -> bool:
        """Whether this machine can prove that the process has ended. Otherwise only the end of the lease proves it."""
        if not self.boot or (self.boot, self.namespace) != (_boot_id(), _pid_namespace()) or self.began is None:
            return False
        return _start_time(self.process) != self.began

    def to_status(self) -> dict[str, Any]:
        return {"host": self.host, "process": self.process, "since": self.since}


def lease_address(plan: PipelinePlan) -> RedisAddress | None:
    """Return the Redis that keeps the lease; None if no Redis is needed for every batch."""
    required = (address for sink in plan.gating for address in sink.addresses())
    return next(required, None) or next(iter(plan.pipeline.spec.source.addresses()), None)


def current_holder(plan: PipelinePlan, checkpoint: Checkpoint) -> Holder | None:
    """Return the process that runs the pipeline now, for a status; None if none does or Redis does not answer."""
    try:
        return _read_holder(plan, checkpoint)
    except MillstreamError:
        return None


def refuse_if_held(plan: PipelinePlan, checkpoint: Checkpoint) -> None:
    """Raise CheckpointLocked if a process runs the pipeline. If Redis does not answer, its error is raised when the
    last run was on another host; on this host, the lock of the checkpoint decides."""
    try:
        holder = _read_holder(plan, checkpoint)
    except MillstreamError:
        if checkpoint.was_run_elsewhere():
            raise
        return
    if holder is not None:
        raise CheckpointLocked(checkpoint.location, holder.host, holder.process, holder.since)


def _read_holder(plan: PipelinePlan, checkpoint: Checkpoint) -> Holder | None:
    identity, address = checkpoint.identity(), lease_address(plan)
    if identity is None or address is None:
        return None
    keys = _Keys(str(identity.get("application")))
    with address.open(deadline_ms=1_000) as broker:
        record, running = _read(broker, keys)
    holder = None if running is None else Holder.parse(record)
    return None if holder is None or holder.is_dead() else holder


class _Keys:
    """The names of a lease's keys, which are in one hash slot."""

    def __init__(self, application: str) -> None:
        self.stream = f"pipeline:{application}"
        self.owner = companion_key(self.stream, "owner")
        self.running = companion_key(self.stream, "running")


class RunLease:
    """The lease of one pipeline. ``acquire`` and ``release`` are called by one thread, the rest by any thread.

    While it is held, a thread with a connection of its own renews it, however busy the driver is.
    """

    def __init__(self, plan: PipelinePlan, *, lease_s: float = LEASE_S) -> None:
        self.address = lease_address(plan)
        self.checkpoint = Checkpoint.of(plan.pipeline)
        self.holder = Holder.this_process()
        """This process."""
        self.lost: LeaseLost | None = None
        """Why this process may not go on; None while it may."""
        self.last_batch: int | None = None
        """The last batch that this run has begun; set by the run."""
        self.on_lost: Callable[[], None] = lambda: None
        required = [sink.config.id for sink in plan.gating if self.address in [*sink.addresses()]]
        self.sink = required[0] if required else None
        """The required sink whose Redis has the lease; None if it is that of the source, or there is none."""
        self._plan = plan
        self._name = plan.pipeline.name
        self._lease_ms = int(lease_s * 1000)
        self._lock = threading.RLock()
        self._broker: BlockingBroker | None = None
        self._keys: _Keys | None = None
        self._keys_of_another: _Keys | None = None
        """Of the lease that refused this process last. A waiting standby asks only Redis, and not the store."""
        self._record: bytes | None = None
        self._released = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    # --- start and end ---

    def peek(self) -> None:
        """Lock the checkpoint on this machine. Raises CheckpointLocked if another process visibly runs the pipeline.

        Cheap, and before Spark starts; ``acquire`` decides. A checkpoint in a store with a scheme cannot be read yet.
        """
        if not self.checkpoint.is_local:
            return
        locked = self._lock_here()
        identity = self.checkpoint.identity()
        holder = running = None
        if self.address is not None and identity is not None:
            with contextlib.suppress(MillstreamError):  # the checks before the start report it
                record, running = _read(self._open(), _Keys(str(identity.get("application"))))
                holder = Holder.parse(record)
        if running is not None and holder is not None and not holder.is_dead():
            self.checkpoint.unlock()
            raise self._refused(holder)
        if locked is not None and holder is None:
            raise locked

    def acquire(self) -> None:
        """Take the lease. Raises CheckpointLocked if another process holds it, or holds the lock on this machine.

        If Redis does not answer, the lock on this machine is enough to start: the lease is taken later, and no batch
        begins before (``verify``). A checkpoint in a store has no such lock, so the error of Redis is raised.
        """
        locked = self._lock_here()
        if self.address is None:
            if locked is not None:
                raise locked
            return
        try:
            self._take(locked)
        except TRANSIENT as error:
            if locked is not None:
                raise locked from None
            if not self.checkpoint.is_local:
                raise
            log.warning("pipeline %s: no lease yet; batches wait for it: %s", self._name, short(error))
        except BaseException:  # refused or interrupted: the next start must find the checkpoint unlocked
            if locked is None and self._record is None:
                self.checkpoint.unlock()
            raise
        self._thread = threading.Thread(target=self._renew_loop, name="millstream-run-lease", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Let another process start at once. If Redis does not answer, the lease expires."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(5)
        with self._lock:
            self._released = True
        broker, keys, record = self._broker, self._keys, self._record
        if broker is not None and keys is not None and record is not None and self.lost is None:
            with contextlib.suppress(MillstreamError):
                broker.run(release_leases, [(keys.stream, record)])
                broker.run(unlock_keys, [keys.running], record)
        if broker is not None:
            with contextlib.suppress(MillstreamError):
                broker.close()
        self._broker = self._record = self._thread = None
        self.checkpoint.unlock()

    # --- while it is held ---

    def confirm(self) -> None:
        """Renew the lease in one round trip; take it if Redis did not answer before.

        Raises LeaseLost if another process took it, StopRequested after ``release``, or a transient error of Redis.
        """
        if self.address is not None:
            self._confirm()

    def require(self) -> None:
        """Raise unless the lease was taken and is not known to be lost. Needs Redis only if it was never taken."""
        if self.lost is not None:
            raise self.lost
        if self._record is None:
            self.confirm()

    def verify(self, stopping: threading.Event) -> None:
        """Return when Redis has confirmed that this process holds the lease.

        Raises LeaseLost if another process took it, StopRequested if ``stopping`` is set while Redis does not answer,
        and LeaseUnverified if it does not answer for longer than ``retry.deadline``.
        """
        if self.address is None:
            return
        began, attempts = time.monotonic(), 0
        while True:
            try:
                self._confirm()
                return
            except TRANSIENT as error:
                attempts += 1
                if attempts == 1:
                    log.warning("pipeline %s: waiting to verify its lease: %s", self._name, short(error))
                if self._plan.pipeline.spec.retry.over((time.monotonic() - began) * 1000):
                    raise LeaseUnverified(self._name, str(self.address), short(error)) from error
            if stopping.wait(_RETRY_S):
                if self.lost is not None:
                    raise self.lost
                raise StopRequested("asked to stop while the lease could not be verified; the batch is replayed")

    def fence_for(self, address: RedisAddress) -> Fence | None:
        """Return the fence for writes to ``address``: its server must hold the lease, and not be a Cluster.

        On a Cluster, and on other servers, a stale process is stopped by the markers of append_once (decision 20).
        """
        if self._record is None or self._keys is None or address != self.address or "+cluster" in address.uri:
            return None
        return Fence(self._keys.owner, self._record)

    def fence_option(self, address: RedisAddress) -> str:
        """Return the option ``fence`` of the format ``redis_streams``."""
        fence = self.fence_for(address)
        return "none" if fence is None else f"{fence.key.decode()} {fence.record.decode()}"

    def check(self) -> LeaseLost | None:
        """Return why this process may not go on, as far as Redis can be asked now; None otherwise."""
        try:
            if self.address is not None:
                self._confirm()
        except LeaseLost as lost:
            return lost
        except MillstreamError:
            pass  # unknown: the next batch verifies it
        return self.lost

    # --- inside ---

    def _lock_here(self) -> CheckpointLocked | None:
        try:
            self.checkpoint.lock()
        except CheckpointLocked as locked:
            return locked
        return None

    def _open(self) -> BlockingBroker:
        assert self.address is not None
        if self._broker is None:
            self._broker = self.address.open(deadline_ms=min(self._lease_ms, 2_000))
        return self._broker

    def _take(self, locked: CheckpointLocked | None) -> None:
        """Take the lease. ``locked``: why this process could not lock the checkpoint on this machine, if so."""
        broker = self._open()
        if self._keys_of_another is not None:
            self._read_unless_held(broker, self._keys_of_another)
        while True:
            keys = _Keys(self._application(locked))
            record, running, holder = self._read_unless_held(broker, keys)
            if locked is not None and holder is None:
                raise locked  # that process runs without a lease: Redis was away or has lost its data
            member = self.holder.text()
            [number] = broker.run(take_leases, member, [(keys.stream, record)])
            if isinstance(number, MillstreamError):
                raise number
            if number is not None:
                break
            # Another process took it since it was read.
        self._keys, self._record = keys, b"%d %b" % (number, member.encode())
        broker.run(unlock_keys, [keys.running], running or b"-")
        broker.run(lock_keys, [keys.running], self._record, ttl_ms=self._lease_ms)
        self.last_batch = self.checkpoint.last_planned()
        if holder is not None:
            log.warning(
                "pipeline %s: took over from process %d on host %s, which had run it since %s",
                *(self._name, holder.process, holder.host, holder.since),
            )
        if locked is not None:
            self.checkpoint.lock(take_over=True)

    def _read_unless_held(
        self, broker: BlockingBroker, keys: _Keys
    ) -> tuple[bytes | None, bytes | None, Holder | None]:
        """Return the owner record, the record of the running process, and the last holder. Raises CheckpointLocked."""
        record, running = _read(broker, keys)
        holder = Holder.parse(record)
        if running is not None and holder is not None and not holder.is_dead():
            self._keys_of_another = keys
            broker.run(limit_locks, [keys.running], ttl_ms=self._lease_ms)
            raise self._refused(holder)
        return record, running, holder

    def _application(self, locked: CheckpointLocked | None) -> str:
        """Return the application id of the checkpoint, which is created if there is none."""
        identity = self.checkpoint.identity()
        if identity is not None:
            return str(identity.get("application"))
        if locked is not None:
            raise locked
        return self.checkpoint.open(self._plan)

    def _refused(self, holder: Holder) -> CheckpointLocked:
        return CheckpointLocked(self.checkpoint.location, holder.host, holder.process, holder.since)

    def _renew_loop(self) -> None:
        while not self._stop.wait(self._lease_ms / 1000 / _RENEWALS_PER_LEASE):
            try:
                self._confirm()
            except (LeaseLost, StopRequested):
                return
            except TRANSIENT as error:
                log.debug("pipeline %s: the lease could not be renewed: %s", self._name, short(error))
            except Exception as error:  # the thread must not end while the lease may still be good
                log.warning("pipeline %s: the lease could not be renewed: %s", self._name, short(error))

    def _confirm(self) -> None:
        """Renew the lease. Raises LeaseLost if it belongs to another process, or what the server answered."""
        with self._lock:
            if self.lost is not None:
                raise self.lost
            if self._released:
                raise StopRequested(
                    "this run has ended and released its lease; the batch is replayed at the next start"
                )
            if self._record is None:
                self._take_late()
            else:
                self._renew()

    def _take_late(self) -> None:
        """The first contact with Redis after a start without it."""
        try:
            self._take(None)
        except CheckpointLocked as error:
            self._lose(Holder(error.host or "unknown", error.process or 0, error.since or "an unknown time"))

    def _renew(self) -> None:
        broker, keys, record = self._open(), self._keys, self._record
        assert keys is not None
        assert record is not None
        owners, runners = broker.run(renew_leases, [keys.owner], [keys.running], lock_ttl_ms=self._lease_ms)
        current, running = _value(owners[0]), _value(runners[0])
        if current is None:
            # Redis lost its data. Another process that took over before has planned batches of its own.
            planned = self.checkpoint.last_planned()
            if planned is not None and planned > (-1 if self.last_batch is None else self.last_batch) + 1:
                self._lose(None)
            [written] = broker.run(lock_keys, [keys.owner], record, ttl_ms=OWNER_TTL_MS)
            if written is True:
                log.warning("pipeline %s: Redis had lost its lease, which was written again", self._name)
            elif isinstance(written, MillstreamError):
                raise written
            else:
                self._lose(None)
        elif current != record:
            self._lose(Holder.parse(current))
        if running != record:
            broker.run(lock_keys, [keys.running], record, ttl_ms=self._lease_ms)

    def _lose(self, holder: Holder | None) -> None:
        where = ("unknown", "unknown", "an unknown time")
        if holder is not None:
            where = (holder.host, str(holder.process), holder.since)
        self.lost = LeaseLost(self._name, *where)
        self.on_lost()
        raise self.lost


def _read(broker: BlockingBroker, keys: _Keys) -> tuple[bytes | None, bytes | None]:
    """Return the owner record, and the record of the process that is running now."""
    owners, runners = broker.run(read_leases, [keys.stream], [keys.running])
    return _value(owners[0]), _value(runners[0])


def _value(reply: bytes | MillstreamError | None) -> bytes | None:
    if isinstance(reply, MillstreamError):
        raise reply
    return reply


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _start_time(process: int) -> int | None:
    """Return when a process began, in ticks of the kernel; None if it has ended (or is a zombie)."""
    try:
        # After the program's name, which may contain spaces and brackets.
        fields = Path("/proc", str(process), "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
        state, *fields_after_state = fields.split()
        return None if state in "ZX" else int(fields_after_state[18])
    except (OSError, ValueError, IndexError):
        return None
