"""The last look before Spark starts: there is a Java, the checkpoints fit, passwords are right and can reach their
readers, and ``--once`` can end."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from millstream.pipelines.checkpoint import Checkpoint
from millstream.pipelines.errors import CheckpointRefused, Problem, SpecRefused
from millstream.pipelines.plan import PipelinePlan, Placed
from millstream.pipelines.redis_address import NotAnswering, RedisAddress, unreachable
from millstream.pipelines.session import SqlParser, parser

log = logging.getLogger("millstream.pipelines")

OLDEST_JAVA: Final = 17
_INSTALL: Final = "Install it: apt-get install openjdk-17-jre-headless"
_JAVA_STARTS_S: Final = 60.0


def check_before(plans: Sequence[PipelinePlan], *, once: bool, master: str) -> None:
    """Raises one SpecRefused with everything that stands in the way. A server that does not answer does not: it may
    come, and a required sink is waited for. Nor does an optional sink that refuses: the others go on without it."""
    problems = [
        Problem(made.pipeline.name, 0, where, why) for made in plans for where, why in _problems(made, once, master)
    ]
    if problems:
        raise SpecRefused(problems)


def check_parts(plans: Sequence[PipelinePlan]) -> None:
    """For whoever only validates: functions that do not import; and, where Spark can run, SQL that does not parse.
    Raises SpecRefused."""
    problems = [Problem(made.pipeline.name, 0, where, why) for made in plans for where, why in _part_problems(made)]
    has_sql = any(placed.processor.has_sql for made in plans for placed in _placed(made))
    if has_sql and find_spec("pyspark") is not None and java_problem() is None:
        with parser() as spark:
            problems += _sql_problems(plans, spark)
    if problems:
        raise SpecRefused(problems)


def check_sql(plans: Sequence[PipelinePlan], spark: SqlParser) -> None:
    """Before the first batch would find it. Raises SpecRefused."""
    if problems := _sql_problems(plans, spark):
        raise SpecRefused(problems)


def _sql_problems(plans: Sequence[PipelinePlan], spark: SqlParser) -> list[Problem]:
    return [
        Problem(made.pipeline.name, 0, placed.name, why)
        for made in plans
        for placed in _placed(made)
        for why in placed.processor.problems_in_sql(spark)
    ]


def _placed(made: PipelinePlan) -> Sequence[Placed]:
    return (*made.streaming, *made.per_batch)


def _part_problems(made: PipelinePlan) -> Iterator[tuple[str, str]]:
    for placed in _placed(made):
        for why in placed.processor.problems_before_start():
            yield placed.name, why


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
    yield from _part_problems(made)
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
            try:
                asked[address] = address.refusal()
            except NotAnswering as away:
                asked[address] = None
                log.warning("%s: %s", made.pipeline.name, _waited_for(made, where, address, away, where in optional))
        why = asked[address]
        if why is not None and where in optional:
            log.error(
                "%s: %s refuses, and is optional: the others go on without it: %s", made.pipeline.name, where, why
            )
        elif why is not None:
            yield where, why


def _waited_for(made: PipelinePlan, where: str, address: RedisAddress, away: NotAnswering, optional: bool) -> str:
    """What becomes of somebody who does not answer: a required sink is tried for so long, an optional one later."""
    if optional:
        return f"{where} at {address} does not answer ({away}); it is optional: its batches wait on disk until it does"
    deadline = made.pipeline.spec.retry.deadline
    until = "until it answers" if deadline == "none" else f"for {deadline / 1000:g} s, then the pipeline fails"
    return f"{where} at {address} does not answer ({away}). It is tried {until}, as retry.deadline says"


def java_problem() -> str | None:
    """What is wrong with the Java that Spark's own script would run, and what to do, in one sentence for people; None
    where Spark can run on it."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if java is None:
        return f"Spark needs Java {OLDEST_JAVA} or newer, and there is none. {_INSTALL}"
    if not os.access(java, os.X_OK):
        return f"JAVA_HOME is {home}, where no bin/java is. Unset it, or let it name a Java of {OLDEST_JAVA} or newer."
    mend = "Let JAVA_HOME name another." if home else f"{_INSTALL}, or let JAVA_HOME name another."
    try:
        asked = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=_JAVA_STARTS_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{java} does not start ({error}), and Spark needs it. {mend}"
    lines = [line.strip() for line in (asked.stderr + asked.stdout).splitlines() if not line.startswith("Picked up ")]
    said = next(filter(None, lines), "no word")
    version = re.search(r'version "(?:1\.)?(\d+)', asked.stderr + asked.stdout)
    if asked.returncode or version is None:
        return f"{java} does not start (exit code {asked.returncode}: {said[:200]}), and Spark needs it. {mend}"
    if int(version[1]) < OLDEST_JAVA:
        return f"Spark needs Java {OLDEST_JAVA} or newer, and {java} is {version[1]}. {mend}"
    return None
