"""A pipeline's directory: whose it is, what its spec was, how far Spark is. Local, or shared by driver and executors.

<path>/millstream.json   the pipeline's name, its application id, and the fingerprints of its spec
<path>/control.json      which process runs it now, while it does, and where that answers
<path>/spark/            Spark's own checkpoint: offsets/, commits/, state/
<path>/spool/<sink>/     batches that an optional sink has not taken yet
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from millstream.pipelines.errors import CheckpointRefused, NoSuchCheckpoint, PipelineRuns
from millstream.pipelines.plan import PipelinePlan
from millstream.pipelines.redis_address import without_secrets
from millstream.pipelines.spec.part import HASHED

_FILE = "millstream.json"
_CONTROL = "control.json"
_FORMAT = 2
"""1 was 0.1.0's, whose batches held documents that Spark had written anew."""


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """One batch as Spark's logs have it: planned, and perhaps committed."""

    id: int
    planned_ms: int
    committed_ms: int | None
    offsets: tuple[Any, ...]


class Checkpoint:
    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    @property
    def spark(self) -> str:
        return str((self.path / "spark").absolute())

    def spool(self, sink: str) -> Path:
        return (self.path / "spool" / sink).absolute()

    def identity(self) -> dict[str, Any] | None:
        """What the directory says of itself; None where nothing is there."""
        try:
            found = json.loads((self.path / _FILE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise CheckpointRefused(str(self.path), [f"{_FILE} cannot be read: {error}"]) from error
        return found if isinstance(found, dict) else {}

    def verdicts(self, plan: PipelinePlan) -> list[ChangeVerdict]:
        """What of the spec has changed since the checkpoint was made, and what that means for it."""
        found = self.identity()
        if found is None:
            return []
        old: Fingerprint = found.get("parts", {})
        return compare(old, fingerprint(plan), in_flight=self.in_flight(), waiting=self.waiting())

    def open(self, plan: PipelinePlan) -> str:
        """Makes the directory, or checks that it is this pipeline's and fits; returns the application id."""
        self.check(plan)
        found = self.identity()
        if found is None:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            found = {"format": _FORMAT, "application": f"{plan.pipeline.name}-{secrets.token_hex(4)}"}
        if found.get("format") == 1:
            found |= {"format": _FORMAT, "old_batch": self.in_flight()}
        found |= {"pipeline": plan.pipeline.name, "tenant": plan.pipeline.tenant, "parts": fingerprint(plan)}
        write_atomically(self.path / _FILE, json.dumps(found, indent=1))
        return str(found["application"])

    def owned(self, plan: PipelinePlan) -> bool:
        """Whether it is there at all. Raises CheckpointRefused where it is somebody else's, or no checkpoint."""
        found = self.identity()
        if found is None:
            if self.path.exists() and any(self.path.iterdir()):
                why = "the directory is not empty, and is no checkpoint of a pipeline. Choose another path."
                raise CheckpointRefused(str(self.path), [why])
            return False
        theirs, ours = (found.get("tenant"), found.get("pipeline")), (plan.pipeline.tenant, plan.pipeline.name)
        if theirs != ours:
            why = f"it belongs to pipeline {theirs[1]!r} of tenant {theirs[0]!r}; this is {ours[1]!r} of {ours[0]!r}. "
            raise CheckpointRefused(str(self.path), [why + "Give each pipeline a checkpoint of its own."])
        return True

    def check(self, plan: PipelinePlan) -> list[ChangeVerdict]:
        """Raises CheckpointRefused where this spec cannot go on from here; otherwise says what has changed."""
        if not self.owned(plan):
            return []
        verdicts = self.verdicts(plan)
        refused = [f"{v.part}: {v.why}" for v in verdicts if not v.compatible]
        if refused:
            raise CheckpointRefused(str(self.path), refused)
        return verdicts

    def announce(self, url: str | None) -> None:
        """Writes that this process runs the pipeline, and where it answers for it; None: nowhere."""
        said = {"url": url, "pid": os.getpid(), "began": _began(os.getpid())}
        write_atomically(self.path / _CONTROL, json.dumps(said))

    def withdraw(self) -> None:
        """This process no longer runs it."""
        if (self._control() or {}).get("pid") == os.getpid():
            (self.path / _CONTROL).unlink(missing_ok=True)

    def run_by(self) -> int | None:
        """The process that runs the pipeline; None where none has said so, or it was killed."""
        said = self._control() or {}
        process = said.get("pid")
        if not isinstance(process, int) or not _alive(process):
            return None
        # Numbers are given out again, and in a container every first process is 1: the same one began at that time.
        before, now = said.get("began"), _began(process)
        return process if before is None or now is None or before == now else None

    def answers_at(self) -> str | None:
        """Where the process answers that runs the pipeline; None where it has said nothing, or was killed."""
        url = None if self.run_by() is None else (self._control() or {}).get("url")
        return None if url is None else str(url)

    def _control(self) -> dict[str, Any] | None:
        try:
            found = json.loads((self.path / _CONTROL).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def in_flight(self) -> int | None:
        """The batch that was planned and not committed: Spark will run it again, with the same rows."""
        planned, committed = self._numbers("offsets"), self._numbers("commits")
        last = max(planned, default=-1)
        return last if last > max(committed, default=-1) else None

    def old_batch(self) -> int | None:
        """The batch that 0.1.0 planned and did not commit, while it is not: what it wrote of it must be met."""
        found, in_flight = (self.identity() or {}).get("old_batch"), self.in_flight()
        return in_flight if found is not None and found == in_flight else None

    def committed(self, batch_id: int) -> bool:
        return (self.path / "spark" / "commits" / str(batch_id)).exists()

    def last_committed(self) -> int | None:
        return max(self._numbers("commits"), default=None)

    def last_planned(self) -> int | None:
        return max(self._numbers("offsets"), default=None)

    def batches(self, last: int = 20) -> list[BatchRecord]:
        return [self._batch(number) for number in sorted(self._numbers("offsets"))[-last:]]

    def ends(self, batch_id: int) -> tuple[Any, ...] | None:
        """Where a batch ends in each source; None where Spark's logs do not have it (any more)."""
        try:
            return self._batch(batch_id).offsets
        except FileNotFoundError:
            return None

    def _batch(self, number: int) -> BatchRecord:
        offset, commit = (self.path / "spark" / kind / str(number) for kind in ("offsets", "commits"))
        lines = offset.read_text(encoding="utf-8").splitlines()
        metadata: Mapping[str, Any] = {}
        with contextlib.suppress(ValueError, IndexError):
            metadata = json.loads(lines[1])
        positions = []
        for line in lines[2:]:
            with contextlib.suppress(ValueError):
                positions.append(json.loads(line))
        done = int(commit.stat().st_mtime * 1000) if commit.exists() else None
        return BatchRecord(number, int(metadata.get("batchTimestampMs", 0)), done, tuple(positions))

    def _numbers(self, kind: str) -> list[int]:
        directory = self.path / "spark" / kind
        return [int(name) for name in os.listdir(directory) if name.isdigit()] if directory.is_dir() else []

    def waiting(self) -> dict[str, int]:
        """How many batches wait on disk for each of the sinks that the checkpoint knows."""
        sinks = (self.identity() or {}).get("parts", {}).get("sinks", {})
        return {sink: len(list(self.spool(sink).glob("[0-9]*"))) for sink in sinks}

    def reset(self, plan: PipelinePlan) -> None:
        """Removes it, if it is this pipeline's. The next start begins at the source's beginning, as another
        application."""
        if not self.owned(plan):
            raise NoSuchCheckpoint(plan.pipeline.name, str(self.path))
        self.must_rest(plan)
        shutil.rmtree(self.path)

    def must_rest(self, plan: PipelinePlan) -> None:
        """Raises PipelineRuns where a process works with it, which would go on without what it has written down."""
        process = self.run_by()
        if process is not None:
            raise PipelineRuns(plan.pipeline.name, process, str(self.path / _CONTROL))


def _alive(process: int) -> bool:
    return not Path("/proc").is_dir() or Path("/proc", str(process)).exists()


def _began(process: int) -> int | None:
    """When a process began, in the kernel's ticks; None where the system does not tell."""
    try:
        # Behind the program's name, which may hold spaces and brackets.
        return int(Path("/proc", str(process), "stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def write_atomically(path: Path, text: str) -> None:
    """A crash leaves the old file or the new one, never half of either."""
    beside = path.with_name(path.name + ".new")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


Fingerprint = dict[str, Any]
_HOW_IT_RUNS = {"required", "spool", "send_timeout", "batch_timeout", "connect_timeout", "password_file"}
_HOW_A_SOURCE_RUNS = _HOW_IT_RUNS | {"durability"}
"""It decides when rows are read, not which."""
_ADDED_SINCE = {("fields", "native")}
"""Settings that 0.1.0 did not have, with the value that means what it did: they do not make a spec another one."""


@dataclass(frozen=True, slots=True)
class ChangeVerdict:
    part: str
    compatible: bool
    why: str


def fingerprint(plan: PipelinePlan) -> Fingerprint:
    spec = plan.pipeline.spec
    stateful = [p for p in (*plan.streaming, *plan.per_batch) if p.processor.kind == "stateful"]
    others = [p for p in (*plan.streaming, *plan.per_batch) if p.processor.kind != "stateful"]
    return {
        "source": {
            "type": spec.source.type,
            "reads": _digest(spec.source.identity()),
            "how": _digest(spec.source, _HOW_A_SOURCE_RUNS),
        },
        "stateful": [{"name": p.name, "type": p.processor.kind_name, "digest": _digest(p.processor)} for p in stateful],
        "processors": [{"name": p.name, "type": p.processor.kind_name, "digest": _digest(p.processor)} for p in others],
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
        kept = {key: inner for key, inner in value.items() if key not in left_out}
        return {key: _harmless(inner, left_out) for key, inner in kept.items() if not _is_added(key, inner)}
    if isinstance(value, list):
        return [_harmless(inner, left_out) for inner in value]
    return without_secrets(value) if isinstance(value, str) and "://" in value else value


def _is_added(key: str, value: Any) -> bool:
    return isinstance(value, str) and (key, value) in _ADDED_SINCE


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
    what = f"{', '.join(changed)} changed or came" if changed else f"{', '.join(gone)} went" if gone else "the order"
    return [ChangeVerdict("processors", True, f"{what}; events from the next batch on go through the new ones")]


def _sinks(old: Mapping[str, Any], new: Mapping[str, Any], waiting: Mapping[str, int]) -> list[ChangeVerdict]:
    verdicts = []
    for name in sorted({*old, *new}):
        if name not in old:
            verdicts.append(ChangeVerdict(f"new sink {name}", True, "it gets events from the next batch on"))
        elif name not in new:
            left = waiting.get(name, 0)
            why = (
                f"{left} batches wait on disk for it and would never be delivered. Let it catch up first"
                if left
                else ""
            )
            verdicts.append(ChangeVerdict(f"sink {name}", not left, why or "it is gone; nothing waits for it"))
        elif old[name]["type"] != new[name]["type"] or old[name]["digest"] != new[name]["digest"]:
            verdicts.append(
                ChangeVerdict(f"sink {name}", True, "it changed; events from the next batch on are written the new way")
            )
        elif old[name]["gates"] != new[name]["gates"]:
            role = "gates the checkpoint now" if new[name]["gates"] else "is optional now"
            left = waiting.get(name, 0)
            if left and new[name]["gates"]:
                why = f"it {role}, but {left} batches wait on disk for it. Let it catch up first"
                verdicts.append(ChangeVerdict(f"sink {name}", False, why))
            else:
                verdicts.append(ChangeVerdict(f"sink {name}", True, f"it {role}"))
    return verdicts
