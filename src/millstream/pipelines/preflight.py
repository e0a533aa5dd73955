"""The last look before Spark starts: the checkpoints fit, passwords are right, and ``--once`` can end."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence

from millstream import open_blocking_broker
from millstream.errors import AuthenticationFailed, MillstreamError, PermissionDenied
from millstream.pipelines.checkpoint import Checkpoint
from millstream.pipelines.errors import CheckpointRefused, Problem, SpecRefused
from millstream.pipelines.plan import PipelinePlan
from millstream.pipelines.processors import Python
from millstream.pipelines.sinks import RedisSink
from millstream.pipelines.sources import RedisSource
from millstream.pipelines.spec.uri import shown

log = logging.getLogger("millstream.pipelines")
_PING_MS = 2_000


def check_before(plans: Sequence[PipelinePlan], *, once: bool) -> None:
    """Raises one SpecRefused with everything that stands in the way. A server that does not answer does not: it may
    come, and a required sink is waited for."""
    problems = [problem for made in plans for problem in _problems(made, once)]
    if problems:
        raise SpecRefused(problems)


def _problems(made: PipelinePlan, once: bool) -> list[Problem]:
    name, found = made.pipeline.name, []
    try:
        for verdict in Checkpoint(made.pipeline.checkpoint_path).check(made):
            log.warning("%s: the spec has changed: %s: %s", name, verdict.part, verdict.why)
    except CheckpointRefused as error:
        found.append(Problem(name, 0, "checkpoint", str(error)))
    if once and made.pipeline.spec.source.endless():
        found.append(Problem(name, 0, "source", "the generator never ends: --once needs rows or rate"))
    for placed in (*made.streaming, *made.per_batch):
        if isinstance(placed.processor, Python) and not _importable(placed.processor.function):
            what = f"{placed.processor.function} cannot be found; put its module on PYTHONPATH, here and on executors"
            found.append(Problem(name, 0, placed.name, what))
    found += [Problem(name, 0, where, why) for where, uri in _addresses(made) if (why := _refusal(uri))]
    return found


def _importable(path: str) -> bool:
    try:
        return importlib.util.find_spec(path.partition(":")[0]) is not None
    except (ImportError, ValueError):
        return False


def _addresses(made: PipelinePlan) -> list[tuple[str, str]]:
    spec = made.pipeline.spec
    found = [(f"sink {s.config.id}", s.config.uri) for s in spec.sinks if isinstance(s, RedisSink)]
    if isinstance(spec.source, RedisSource):
        found.append(("source", spec.source.config.uri))
    if made.dead_letters is not None:
        found.append(("dlq", made.dead_letters.uri))
    return list({uri: (where, uri) for where, uri in reversed(found)}.values())


def _refusal(uri: str) -> str | None:
    """Why this address will never work; None where it does, or may yet."""
    try:
        with open_blocking_broker(uri, deadline_ms=_PING_MS) as broker:
            broker.ping()
    except (AuthenticationFailed, PermissionDenied) as error:
        return f"{shown(uri)}: {type(error).__name__}: {error}"
    except MillstreamError as error:
        log.warning("%s does not answer yet: %s", shown(uri), error)
    return None
