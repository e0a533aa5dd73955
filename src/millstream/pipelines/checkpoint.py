"""The checkpoint of a pipeline: which pipeline it belongs to, what its spec was, how far Spark is.

It is a local directory, a mount that hosts share, or a directory in a store that Hadoop has a connector for (HDFS, an
object store). Its files:

<location>/millstream.json   the pipeline's name, its application id, and the fingerprints of its spec
<location>/control.json      the process that runs the pipeline, and the URL of its HTTP port
<location>/lock              only in a local directory: locked while a process runs or resets the pipeline
<location>/spark/            Spark's own checkpoint: offsets/, commits/, state/
<location>/spool/<sink>/     the queue of an optional sink: batches that it has not taken yet
<location>/segments/         what a change source has read ahead
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel

from millstream.pipelines.errors import CheckpointLocked, CheckpointRefused, NoSuchCheckpoint, PipelineRuns
from millstream.pipelines.java import gateway
from millstream.pipelines.plan import PipelinePlan
from millstream.pipelines.redis_address import without_secrets
from millstream.pipelines.spec.part import HASHED
from millstream.storage import (
    ObjectMissing,
    Storage,
    StorageError,
    StorageUnavailable,
    StoredObject,
    open_storage,
)
from millstream.storage.location import for_spark

if TYPE_CHECKING:
    from millstream.pipelines.spec.pipeline import Pipeline

_FILE = "millstream.json"
_CONTROL = "control.json"
_LOCK = "lock"
_FORMAT = 2
_SPARK = "spark"
_QUEUES = "spool"
MANIFEST_SUFFIX = ".json"
"""A batch in a sink queue is complete once its manifest, ``<batch id>.json``, exists."""


_RECENT_S = 2.0
"""For how long ``recent`` repeats what it has read from a store: listings cost money there."""


@dataclass(frozen=True, slots=True)
class LoggedProgress:
    """The last committed batch, and the batch that was planned and not committed."""

    committed: int | None
    in_flight: int | None


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """One batch as Spark's logs have it: planned, and perhaps committed."""

    id: int
    planned_ms: int
    committed_ms: int | None
    offsets: tuple[Any, ...]


class Checkpoint:
    """The directory in which a pipeline keeps its progress.

    For a store with a scheme every method needs a JVM: that of the Spark session, or one that is started on first use
    (about 3 s).
    """

    def __init__(self, location: str | os.PathLike[str], java: Callable[[], Any] | None = None) -> None:
        """``java`` returns the py4j gateway for a store with a scheme."""
        self.storage: Storage = open_storage(location, java or gateway)
        self._lock_descriptor: int | None = None
        self._recent: tuple[float, LoggedProgress | None] = (float("-inf"), None)

    @classmethod
    def of(cls, pipeline: Pipeline) -> Self:
        """The checkpoint that the spec names, reached with the Hadoop settings of its ``spark.conf``."""
        settings = pipeline.spec.spark.conf
        return cls(pipeline.checkpoint_path, lambda: gateway(settings))

    @property
    def location(self) -> str:
        """The absolute path, or the URI."""
        return self.storage.location

    @property
    def is_local(self) -> bool:
        return self.storage.is_local

    @property
    def path(self) -> Path:
        """Only for a checkpoint in a local directory."""
        assert self.is_local, "a store with a scheme has no path"
        return Path(self.storage.location)

    @property
    def spark(self) -> str:
        return for_spark(self.storage.uri(_SPARK))

    def queue(self, sink: str) -> Storage:
        """The directory of an optional sink's queue."""
        return self.storage.directory(f"{_QUEUES}/{sink}")

    def identity(self) -> dict[str, Any] | None:
        """The content of millstream.json; None if there is none."""
        try:
            identity = json.loads(self.storage.read(_FILE))
        except ObjectMissing:
            return None
        except (StorageError, ValueError) as error:
            if isinstance(error, StorageError) and not self.is_local:
                raise  # of the store: nothing is known about the checkpoint
            raise CheckpointRefused(self.location, [f"{_FILE} cannot be read: {error}"]) from error
        return identity if isinstance(identity, dict) else {}

    def verdicts(self, plan: PipelinePlan) -> list[ChangeVerdict]:
        """What has changed in the spec since the checkpoint was created, and whether the change fits it."""
        identity = self.identity()
        if identity is None:
            return []
        old: Fingerprint = identity.get("parts", {})
        return compare(old, fingerprint(plan), in_flight=self.in_flight(), waiting=self.waiting())

    def open(self, plan: PipelinePlan) -> str:
        """Creates the checkpoint, or verifies that it is this pipeline's and fits; returns the application id."""
        self.check(plan)
        identity = self.identity()
        current = {"pipeline": plan.pipeline.name, "tenant": plan.pipeline.tenant, "parts": fingerprint(plan)}
        if identity is None:
            # Of several processes that start at once, one decides the application id.
            identity = {"format": _FORMAT, "application": f"{plan.pipeline.name}-{secrets.token_hex(4)}"} | current
            if self.storage.create(_FILE, json.dumps(identity, indent=1).encode()):
                return str(identity["application"])
            self.check(plan)
            identity = self.identity() or identity
        if identity | current != identity:
            self.storage.write(_FILE, json.dumps(identity | current, indent=1).encode())
        return str(identity["application"])

    def make_directory(self) -> None:
        """Raises CheckpointRefused if it cannot be created, as next to a file in a read-only directory."""
        try:
            self.storage.make()
        except StorageError as error:
            why = f"the directory cannot be made: {error}. Give another checkpoint.path"
            raise CheckpointRefused(self.location, [why]) from error

    def lock(self, *, take_over: bool = False) -> None:
        """Keep other runs on this machine from this checkpoint until ``unlock`` or the end of the process.

        The kernel releases the lock when the process ends. Raises CheckpointLocked if another run holds it. With
        ``take_over``, which only the holder of the pipeline's lease may use, the lock of a paused process is replaced:
        that process keeps a lock on a file that was removed. A store with a scheme has no such lock.
        """
        if self._lock_descriptor is not None or not self.is_local:
            return
        self.make_directory()
        if take_over:
            (self.path / _LOCK).unlink(missing_ok=True)
        while True:
            try:
                descriptor = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            except OSError as error:  # as in a directory of a read-only file system
                why = f"{_LOCK} cannot be opened: {error}. Give this user access, or another checkpoint.path"
                raise CheckpointRefused(self.location, [why]) from error
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = _lock_holder(descriptor)
                os.close(descriptor)
                host, process, since = (holder.get(key) for key in ("host", "process", "since"))
                raise CheckpointLocked(self.location, host, process, since) from None
            except OSError:
                os.close(descriptor)
                raise
            if os.fstat(descriptor).st_nlink > 0:
                break
            os.close(descriptor)  # a reset removed the file between open and flock
        since = datetime.now(UTC).isoformat(timespec="seconds")
        holder = {"host": socket.gethostname(), "process": os.getpid(), "since": since}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(holder).encode(), 0)
        self._lock_descriptor = descriptor

    def unlock(self) -> None:
        if self._lock_descriptor is not None:
            os.close(self._lock_descriptor)
            self._lock_descriptor = None

    def owned(self, plan: PipelinePlan) -> bool:
        """Whether the checkpoint exists. Raises CheckpointRefused if it is another pipeline's, or no checkpoint."""
        identity = self.identity()
        if identity is None:
            if any(entry.name != _LOCK for entry in self.storage.list()):
                why = "the directory is not empty, and is no checkpoint of a pipeline. Choose another path."
                raise CheckpointRefused(self.location, [why])
            return False
        theirs, ours = (identity.get("tenant"), identity.get("pipeline")), (plan.pipeline.tenant, plan.pipeline.name)
        if theirs != ours:
            why = f"it belongs to pipeline {theirs[1]!r} of tenant {theirs[0]!r}; this is {ours[1]!r} of {ours[0]!r}. "
            raise CheckpointRefused(self.location, [why + "Give each pipeline a checkpoint of its own."])
        return True

    def check(self, plan: PipelinePlan) -> list[ChangeVerdict]:
        """Raises CheckpointRefused if this spec cannot continue from here; otherwise returns what has changed."""
        if not self.owned(plan):
            return []
        verdicts = self.verdicts(plan)
        refused = [f"{v.part}: {v.why}" for v in verdicts if not v.compatible]
        if refused:
            raise CheckpointRefused(self.location, refused)
        return verdicts

    def announce(self, url: str | None) -> None:
        """Records that this process runs the pipeline, and the URL of its HTTP port, if it has one."""
        record = {"url": url, "host": socket.gethostname(), "pid": os.getpid(), "began": _began(os.getpid())}
        self.storage.write(_CONTROL, json.dumps(record).encode())

    def withdraw(self) -> None:
        """Removes the record, if it is of this process."""
        record = self._control() or {}
        if record.get("pid") == os.getpid() and record.get("host", socket.gethostname()) == socket.gethostname():
            self.storage.delete(_CONTROL)

    def run_by(self) -> int | None:
        """The process that runs the pipeline; None if there is no record of it, or it was killed on this host. For
        displays: None also if the store does not answer."""
        return self._process_in(self._control() or {})

    def _process_in(self, record: Mapping[str, Any]) -> int | None:
        process = record.get("pid")
        if not isinstance(process, int):
            return None
        if not self.is_local and record.get("host") != socket.gethostname():
            return process  # on another host, where it cannot be examined
        if not _alive(process):
            return None
        # Process ids are reused, and in a container every first process is 1: the same process has the same start time.
        before, now = record.get("began"), _began(process)
        return process if before is None or now is None or before == now else None

    def was_run_elsewhere(self) -> bool:
        """Whether the process that ran the pipeline last, and did not end by itself, was on another host."""
        host = (self._read_control() or {}).get("host")
        return host is not None and host != socket.gethostname()

    def answers_at(self) -> str | None:
        """The HTTP URL of the process that runs the pipeline; None if it has none, or was killed."""
        url = None if self.run_by() is None else (self._control() or {}).get("url")
        return None if url is None else str(url)

    def _control(self) -> dict[str, Any] | None:
        try:
            return self._read_control()
        except StorageError:
            return None

    def _read_control(self) -> dict[str, Any] | None:
        try:
            record = json.loads(self.storage.read(_CONTROL))
        except (ObjectMissing, ValueError):
            return None
        return record if isinstance(record, dict) else None

    def in_flight(self) -> int | None:
        """The batch that was planned and not committed: Spark will run it again, with the same rows."""
        planned, committed = self._numbers("offsets"), self._numbers("commits")
        last = max(planned, default=-1)
        return last if last > max(committed, default=-1) else None

    def recent(self) -> LoggedProgress:
        """For displays: from a store it may be some seconds old, and older while the store does not answer."""
        read_at, progress = self._recent
        if progress is not None and not self.is_local and time.monotonic() < read_at + _RECENT_S:
            return progress
        try:
            progress = LoggedProgress(self.last_committed(), self.in_flight())
        except StorageUnavailable:
            progress = progress or LoggedProgress(None, None)
        self._recent = (time.monotonic(), progress)
        return progress

    def forget_recent(self) -> None:
        """The next ``recent`` reads the store."""
        self._recent = (float("-inf"), self._recent[1])

    def committed(self, batch_id: int) -> bool:
        return self.storage.exists(f"{_SPARK}/commits/{batch_id}")

    def last_committed(self) -> int | None:
        return max(self._numbers("commits"), default=None)

    def last_planned(self) -> int | None:
        return max(self._numbers("offsets"), default=None)

    def batches(self, last: int = 20) -> list[BatchRecord]:
        return [self._batch(number) for number in sorted(self._numbers("offsets"))[-last:]]

    def ends(self, batch_id: int) -> tuple[Any, ...] | None:
        """Where a batch ends in each source; None if Spark's logs do not have it (any more)."""
        try:
            return self._batch(batch_id).offsets
        except ObjectMissing:
            return None

    def _batch(self, number: int) -> BatchRecord:
        lines = self.storage.read(f"{_SPARK}/offsets/{number}").decode().splitlines()
        metadata: Mapping[str, Any] = {}
        with contextlib.suppress(ValueError, IndexError):
            metadata = json.loads(lines[1])
        positions = []
        for line in lines[2:]:
            with contextlib.suppress(ValueError):
                positions.append(json.loads(line))
        commit: StoredObject | None = self.storage.stat(f"{_SPARK}/commits/{number}")
        committed_ms = None if commit is None else commit.modified_ms
        return BatchRecord(number, int(metadata.get("batchTimestampMs", 0)), committed_ms, tuple(positions))

    def _numbers(self, kind: str) -> list[int]:
        return [int(entry.name) for entry in self.storage.list(f"{_SPARK}/{kind}") if entry.name.isdigit()]

    def waiting(self) -> dict[str, int]:
        """How many batches wait for each of the sinks that the checkpoint knows."""
        sinks = (self.identity() or {}).get("parts", {}).get("sinks", {})
        return {sink: sum(is_manifest(entry.name) for entry in self.queue(sink).list()) for sink in sinks}

    def reset(self, plan: PipelinePlan) -> None:
        """Removes the checkpoint, if it is this pipeline's. The next start begins at the source's beginning, as another
        application."""
        if not self.owned(plan):
            raise NoSuchCheckpoint(plan.pipeline.name, self.location)
        self.must_rest(plan)
        self.lock()
        try:
            self.storage.delete("")
        finally:
            self.unlock()

    def must_rest(self, plan: PipelinePlan) -> None:
        """Raises PipelineRuns if a process runs the pipeline: it would continue without its checkpoint. Raises the
        error of a store that does not answer."""
        process = self._process_in(self._read_control() or {})
        if process is not None:
            raise PipelineRuns(plan.pipeline.name, process, self.storage.uri(_CONTROL))


def is_manifest(name: str) -> bool:
    return name.endswith(MANIFEST_SUFFIX) and name.removesuffix(MANIFEST_SUFFIX).isdigit()


def _lock_holder(descriptor: int) -> dict[str, Any]:
    """What the lock file says about its holder; empty if the holder has not written it yet."""
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) else {}


def _alive(process: int) -> bool:
    return not Path("/proc").is_dir() or Path("/proc", str(process)).exists()


def _began(process: int) -> int | None:
    """When a process began, in the kernel's ticks; None where the system does not tell."""
    try:
        # Behind the program's name, which may hold spaces and brackets.
        return int(Path("/proc", str(process), "stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


Fingerprint = dict[str, Any]
_HOW_IT_RUNS = {"required", "queue", "send_timeout", "batch_timeout", "connect_timeout", "password_file"}
_HOW_A_SOURCE_RUNS = _HOW_IT_RUNS | {"durability"}
"""It decides when rows are read, not which."""


@dataclass(frozen=True, slots=True)
class ChangeVerdict:
    part: str
    compatible: bool
    why: str


def fingerprint(plan: PipelinePlan) -> Fingerprint:
    spec = plan.pipeline.spec
    stateful = [p for p in (*plan.streaming, *plan.per_batch) if p.processor.kind == "stateful"]
    stateless = [p for p in (*plan.streaming, *plan.per_batch) if p.processor.kind != "stateful"]
    return {
        "source": {
            "type": spec.source.type,
            "reads": _digest(spec.source.identity()),
            "how": _digest(spec.source, _HOW_A_SOURCE_RUNS),
        },
        "stateful": [{"name": p.name, "type": p.processor.kind_name, "digest": _digest(p.processor)} for p in stateful],
        "processors": [
            {"name": p.name, "type": p.processor.kind_name, "digest": _digest(p.processor)} for p in stateless
        ],
        "sinks": {s.config.id: {"type": s.type, "digest": _digest(s), "gates": s in plan.gating} for s in spec.sinks},
        "delivery": plan.delivery,
    }


def _digest(part: BaseModel | Mapping[str, Any], left_out: Set[str] = _HOW_IT_RUNS) -> str:
    plain = part.model_dump(mode="json", by_alias=True, context=HASHED) if isinstance(part, BaseModel) else part
    text = json.dumps(_harmless(plain, left_out), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _harmless(value: Any, left_out: Set[str]) -> Any:
    """Without passwords, and without what only decides how long to try: neither changes which rows are written."""
    if isinstance(value, Mapping):
        relevant = {key: inner for key, inner in value.items() if key not in left_out}
        return {key: _harmless(inner, left_out) for key, inner in relevant.items()}
    if isinstance(value, list):
        return [_harmless(inner, left_out) for inner in value]
    return without_secrets(value) if isinstance(value, str) and "://" in value else value


def compare(
    old: Fingerprint, new: Fingerprint, *, in_flight: int | None, waiting: Mapping[str, int]
) -> list[ChangeVerdict]:
    """Each change with its verdict. ``in_flight`` is a batch that will be replayed, ``waiting`` counts batches that an
    optional sink has not taken."""
    if not old:
        return []
    verdicts = [*_source(old["source"], new["source"]), *_state(old["stateful"], new["stateful"])]
    touched = [*_processors(old["processors"], new["processors"]), *_sinks(old["sinks"], new["sinks"], waiting)]
    if old["source"]["how"] != new["source"]["how"] and old["source"]["reads"] == new["source"]["reads"]:
        touched.append(ChangeVerdict("source", True, "its settings changed; what it reads did not"))
    if old["delivery"] != new["delivery"]:
        touched.append(ChangeVerdict("delivery", True, f"{old['delivery']} became {new['delivery']}"))
    if in_flight is not None:
        # The batch may be in a sink already, made by the old spec: what the new one makes of it would not match.
        why = (
            f"; but batch {in_flight} is not committed, and must be replayed by the spec that made it. "
            "Run the old spec once more (`millstream pipeline run --once`), then this one"
        )
        touched = [
            ChangeVerdict(v.part, v.part.startswith("new "), v.why + ("" if v.part.startswith("new ") else why))
            for v in touched
        ]
    return verdicts + touched


def _source(old: Mapping[str, str], new: Mapping[str, str]) -> list[ChangeVerdict]:
    if old["type"] != new["type"]:
        why = f"it was {old['type']} and is {new['type']}: offsets of the one mean nothing to the other"
    elif old["reads"] != new["reads"]:
        why = "it reads from elsewhere now, and the checkpoint's offsets belong to the old place"
    else:
        return []
    return [ChangeVerdict("source", False, why + ". Use another checkpoint, or `millstream pipeline reset`")]


def _state(old: list[Mapping[str, str]], new: list[Mapping[str, str]]) -> list[ChangeVerdict]:
    if [(p["type"], p["digest"]) for p in old] == [(p["type"], p["digest"]) for p in new]:
        return []
    before, after = (", ".join(p["name"] + " " + p["type"] for p in side) or "none" for side in (old, new))
    why = f"state was kept for {before}, and would be kept for {after}: Spark cannot turn one into the other"
    return [ChangeVerdict("stateful processors", False, why + ". Change it back, use another checkpoint, or reset")]


def _processors(old: list[Mapping[str, str]], new: list[Mapping[str, str]]) -> list[ChangeVerdict]:
    before, after = ([(p["type"], p["digest"]) for p in side] for side in (old, new))
    if before == after:
        return []
    changed = [f"{p['name']} {p['type']}" for p, made in zip(new, after, strict=True) if made not in before]
    gone = [f"{p['name']} {p['type']}" for p, made in zip(old, before, strict=True) if made not in after]
    change = f"{', '.join(changed)} changed or came" if changed else f"{', '.join(gone)} went" if gone else "the order"
    return [ChangeVerdict("processors", True, f"{change}; events from the next batch on go through the new ones")]


def _sinks(old: Mapping[str, Any], new: Mapping[str, Any], waiting: Mapping[str, int]) -> list[ChangeVerdict]:
    verdicts = []
    for name in sorted({*old, *new}):
        if name not in old:
            verdicts.append(ChangeVerdict(f"new sink {name}", True, "it gets events from the next batch on"))
        elif name not in new:
            batches = waiting.get(name, 0)
            why = (
                f"{batches} batches wait on disk for it and would never be delivered. Let it catch up first"
                if batches
                else ""
            )
            verdicts.append(ChangeVerdict(f"sink {name}", not batches, why or "it is gone; nothing waits for it"))
        elif old[name]["type"] != new[name]["type"] or old[name]["digest"] != new[name]["digest"]:
            verdicts.append(
                ChangeVerdict(f"sink {name}", True, "it changed; events from the next batch on are written the new way")
            )
        elif old[name]["gates"] != new[name]["gates"]:
            role = "gates the checkpoint now" if new[name]["gates"] else "is optional now"
            batches = waiting.get(name, 0)
            if batches and new[name]["gates"]:
                why = f"it {role}, but {batches} batches wait on disk for it. Let it catch up first"
                verdicts.append(ChangeVerdict(f"sink {name}", False, why))
            else:
                verdicts.append(ChangeVerdict(f"sink {name}", True, f"it {role}"))
    return verdicts
