"""A pipeline's directory: whose it is, what its spec was, how far Spark is. Local, or shared by driver and executors.

<path>/millstream.json   the pipeline's name, its application id, and the fingerprints of its spec
<path>/control.json      where the process answers that runs it now, while it does
<path>/spark/            Spark's own checkpoint: offsets/, commits/, state/
<path>/spool/<sink>/     batches that an optional sink has not taken yet
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream.pipelines.errors import CheckpointRefused, NoSuchCheckpoint
from millstream.pipelines.fingerprint import ChangeVerdict, Fingerprint, compare, fingerprint
from millstream.pipelines.plan import PipelinePlan

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
        """Writes where this process answers for the pipeline; None: it no longer does."""
        if url is not None:
            write_atomically(self.path / _CONTROL, json.dumps({"url": url, "pid": os.getpid()}))
        elif (self._control() or {}).get("pid") == os.getpid():
            (self.path / _CONTROL).unlink(missing_ok=True)

    def answers_at(self) -> str | None:
        """Where the process answers that runs the pipeline; None where it has said nothing, or was killed."""
        found = self._control()
        alive = found is not None and (not Path("/proc").is_dir() or Path("/proc", str(found.get("pid"))).exists())
        return str(found["url"]) if found is not None and alive and "url" in found else None

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
        shutil.rmtree(self.path)


def write_atomically(path: Path, text: str) -> None:
    """A crash leaves the old file or the new one, never half of either."""
    beside = path.with_name(path.name + ".new")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
