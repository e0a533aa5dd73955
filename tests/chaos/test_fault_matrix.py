"""Every part is tried with every fault of the table. A ledger shows confirmed messages that are missing or duplicated.

`make test` tries every pair of part, fault and phase at least once; `make chaos` tries every triple, and on a cluster
of three too.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

from chaos.parts import (
    AssignedPart,
    DeadLetterPart,
    Part,
    ReadingPart,
    ReplayPart,
    SparkSinkPart,
    SubscriberPart,
    writing,
)
from chaos.planting import PASSES, Planting
from chaos.spark_parts import SinkQueuePart, SparkSourcePart
from chaos.writers import ASYNC_WRITERS
from millstream import open_broker
from millstream.testing import eventually
from millstream.testing.answering import pass_on
from support.fault_table import TABLE, FaultRow, Follows, Phase
from support.proxied import AnsweringProxies, Servers, each

IN_FULL = int(os.environ.get("TRIALS", "2")) > 2
AT_A_TIME = 8
PARTS: list[type[Part]] = [
    *(writing(item) for item in ASYNC_WRITERS),
    SparkSinkPart,
    SparkSourcePart,
    SinkQueuePart,
    SubscriberPart,
    DeadLetterPart,
    ReplayPart,
    AssignedPart,
]

SEND_ONE_SCRIPT = ("replay", "spark source")

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]


def phases(fault: FaultRow, part: type[Part]) -> Iterator[Phase]:
    """The phases in which this part can meet the fault."""
    for phase in Phase:
        if (
            fault.follows(phase) is Follows.NEVER
            or fault.name == "WRONGPASS"  # only a login gets it
            or (phase is Phase.TRANSACTION and not part.transactions)
            or (phase in (Phase.COMMAND, Phase.BATCH) and part.transactions)
            or (phase is Phase.COMMAND and part.kind == "batch")  # it would leave a gap
            or (phase is Phase.BLOCKED and not part.blocks)
            or (fault.name == "NOSCRIPT" and part.kind in ("xadd", "batch"))
            or (fault.name == "NOSCRIPT" and part.kind in SEND_ONE_SCRIPT and phase is Phase.BATCH)
        ):
            continue
        yield phase


Cell = tuple[type[Part], FaultRow, Phase]


def every_cell() -> list[Cell]:
    return [(part, fault, phase) for part in PARTS for fault in TABLE for phase in phases(fault, part)]


def pairs(cell: Cell) -> set[tuple[str, str]]:
    part, fault, phase = cell
    return {(part.kind, fault.name), (part.kind, phase.name), (fault.name, phase.name)}


def pairwise() -> list[Cell]:
    """A small set of cells that covers every pair: each next cell covers the most pairs that are still uncovered."""
    chosen: list[Cell] = []
    remaining, unmet = every_cell(), set[tuple[str, str]]().union(*map(pairs, every_cell()))
    while unmet:
        best = max(remaining, key=lambda cell: len(pairs(cell) & unmet))
        chosen.append(best)
        unmet -= pairs(best)
        remaining.remove(best)
    return chosen


CELLS = every_cell() if IN_FULL else pairwise()


def test_make_test_meets_every_pair() -> None:
    """All possible pairs of part and fault, of part and phase, and of fault and phase are covered."""
    few, all_of_them = pairwise(), every_cell()
    print(f"{len(few)} of {len(all_of_them)} cells")
    assert len(few) < len(all_of_them) / 1.5
    assert set().union(*map(pairs, few)) == set().union(*map(pairs, all_of_them))


ON_A_CLUSTER = [part for part in PARTS if part not in (SparkSinkPart, SparkSourcePart, SinkQueuePart)]
"""Messaging and assignment; what Spark does on a cluster is tried with Spark."""
IN_MAKE_TEST = (SubscriberPart, AssignedPart)
COLUMNS = [
    *(pytest.param("redis", part, id=f"redis-{part.kind}") for part in PARTS),
    *(
        pytest.param(
            "cluster", part, id=f"cluster-{part.kind}", marks=() if part in IN_MAKE_TEST else pytest.mark.at_length
        )
        for part in ON_A_CLUSTER
    ),
]


@pytest.mark.parametrize(("servers", "part"), COLUMNS, indirect=["servers"])
async def test_every_part_meets_every_fault(servers: Servers, part: type[Part]) -> None:
    turns = asyncio.Semaphore(AT_A_TIME)

    async def tried(fault: FaultRow, phase: Phase) -> str:
        async with turns:
            description = await meets(servers, part, fault, phase)
        return f"{fault.name}, {phase.value} ({fault.follows(phase).value}): {description}" if description else ""

    verdicts = await asyncio.gather(*(tried(*cell) for kind, *cell in CELLS if kind is part))
    problems = [verdict for verdict in verdicts if verdict]
    print(f"{part.kind}: {len(verdicts)} cells, {len(problems)} problems")
    assert not problems, "\n".join(problems)


async def meets(servers: Servers, kind: type[Part], fault: FaultRow, phase: Phase) -> str:
    follows = fault.follows(phase)
    planting = Planting(fault, phase, each(servers)[0].port)
    name = f"{kind.kind}.{fault.name}.{phase.name}".replace(" ", "-").replace(":", "")
    with AnsweringProxies(servers, planting) as proxy:
        async with open_broker(proxy.url, deadline_ms=30_000) as broker, open_broker(servers.url) as steady:
            part = kind(broker, proxy.url, steady, name, patient=follows in PASSES, group_lost=fault.name == "NOGROUP")
            await part.begin()
            await part.work()
            planting.begun = True
            if phase is Phase.CONNECTING:
                proxy.cut_all()
            await part.work()
            try:
                await eventually(lambda: planting.refused, what="a refusal", timeout_s=20)
            except TimeoutError:
                return "the server was never asked in this phase"
            if isinstance(part, ReadingPart):
                await part.work()
            proxy.choose = pass_on
            await part.lift()
            wrong = await part.verdict()
    problems = [wrong] if wrong else []
    problems += [f"raised {error!r}" for error in part.foreign]
    if follows in PASSES and part.raised:
        problems.append(f"a caller received {part.raised[:2]!r}, although the fault is transient")
    raised = any(isinstance(error, fault.raises) for error in part.raised)
    # A background task of the part (a reader, the mover of delayed messages) may have received the refusal instead.
    has_background_tasks = isinstance(part, ReadingPart) or part.kind == "delays"
    if follows in (Follows.RAISED, Follows.FATAL) and not raised and not has_background_tasks:
        problems.append(f"a caller received {part.raised!r}, and not {fault.raises.__name__}")
    return "; ".join(problems)
