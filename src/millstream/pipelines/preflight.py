"""The last look before Spark starts: the checkpoints fit, passwords are right and can reach their readers, and
``--once`` can end."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from millstream.pipelines.checkpoint import Checkpoint
from millstream.pipelines.errors import CheckpointRefused, Problem, SpecRefused
from millstream.pipelines.plan import PipelinePlan
from millstream.pipelines.secret_files import unreachable
from millstream.pipelines.spec.uri import RedisAddress

log = logging.getLogger("millstream.pipelines")


def check_before(plans: Sequence[PipelinePlan], *, once: bool, master: str) -> None:
    """Raises one SpecRefused with everything that stands in the way. A server that does not answer does not: it may
    come, and a required sink is waited for. Nor does an optional sink that refuses: the others go on without it."""
    problems = [
        Problem(made.pipeline.name, 0, where, why) for made in plans for where, why in _problems(made, once, master)
    ]
    if problems:
        raise SpecRefused(problems)


def _problems(made: PipelinePlan, once: bool, master: str) -> Iterator[tuple[str, str]]:
    name, source = made.pipeline.name, made.pipeline.spec.source
    try:
        for verdict in Checkpoint(made.pipeline.checkpoint_path).check(made):
            log.warning("%s: the spec has changed: %s: %s", name, verdict.part, verdict.why)
    except CheckpointRefused as error:
        yield "checkpoint", str(error)
    if once and source.endless():
        yield "source", "the generator never ends: --once needs rows or rate"
    begun = Checkpoint(made.pipeline.checkpoint_path).last_planned() is not None
    for why in source.problems_before_start(name, begun=begun, master=master):
        yield "source", why
    for placed in (*made.streaming, *made.per_batch):
        for why in placed.processor.problems_before_start():
            yield placed.name, why
    out_of_reach = list(unreachable(made.addresses(), master))
    yield from out_of_reach
    if not out_of_reach:
        yield from _refusals(made)


def _refusals(made: PipelinePlan) -> Iterator[tuple[str, str]]:
    """Each server is asked once, whoever names it."""
    asked: dict[RedisAddress, str | None] = {}
    optional = {f"sink {sink.config.id}" for sink in made.optional}
    for where, address in made.addresses():
        if address not in asked:
            asked[address] = address.refusal()
        why = asked[address]
        if why is not None and where in optional:
            log.error(
                "%s: %s refuses, and is optional: the others go on without it: %s", made.pipeline.name, where, why
            )
        elif why is not None:
            yield where, why
