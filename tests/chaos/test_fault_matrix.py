"""Every part meets every fault of the table. A ledger says whether anything confirmed is missing, or there twice.

In `make test` whatever two of part, fault and phase can meet do so at least once; in `make chaos` all three do, and on
a cluster of three too.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

from chaos.parts import AssignedPart, BurialPart, Part, ReadingPart, ReplayPart, SparkSinkPart, SubscriberPart, writing
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
    *(writing(one) for one in ASYNC_WRITERS),
    SparkSinkPart,
    SparkSourcePart,
    SinkQueuePart,
    SubscriberPart,
    BurialPart,
    ReplayPart,
    AssignedPart,
]

SEND_ONE_SCRIPT = ("replay", "spark source")

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]


def phases(fault: FaultRow, part: type[Part]) -> Iterator[Phase]:
    """Where this part can meet the fault."""
    for phase in Phase:
        if (
            fault.follows(phase) is Follows.NEVER
            or fault.name == "WRONGPASS"  # only a login is told
            or (phase is Phase.TRANSACTION and not part.transactions)
            or (phase in (Phase.COMMAND, Phase.BATCH) and part.transactions)
            or (phase is Phase.COMMAND and part.kind == "batch")  # a refused head and a stored tail: a hole, raised
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
    """Few cells that meet every pair: each is one that meets most of what is still unmet."""
    chosen: list[Cell] = []
    left, unmet = every_cell(), set[tuple[str, str]]().union(*map(pairs, every_cell()))
    while unmet:
        best = max(left, key=lambda cell: len(pairs(cell) & unmet))
        chosen.append(best)
        unmet -= pairs(best)
        left.remove(best)
    return chosen


CELLS = every_cell() if IN_FULL else pairwise()


def test_make_test_meets_every_pair() -> None:
    """Of part and fault, of part and phase, of fault and phase: whatever two of them can meet at all do so."""
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
            what = await meets(servers, part, fault, phase)
        return f"{fault.name}, {phase.value} ({fault.follows(phase).value}): {what}" if what else ""

    verdicts = await asyncio.gather(*(tried(*cell) for kind, *cell in CELLS if kind is part))
    complaints = [one for one in verdicts if one]
    print(f"{part.kind}: {len(verdicts)} cells, {len(complaints)} complaints")
    assert not complaints, "\n".join(complaints)


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
    complaints = [wrong] if wrong else []
    complaints += [f"raised {error!r}" for error in part.foreign]
    if follows in PASSES and part.raised:
        complaints.append(f"was told {part.raised[:2]!r}, though it passes")
    told = any(isinstance(error, fault.raises) for error in part.raised)
    # What runs beside its callers may have been refused in their place: readers, and whoever moves what is delayed.
    companion_key = isinstance(part, ReadingPart) or part.kind == "delays"
    if follows in (Follows.RAISED, Follows.FATAL) and not told and not companion_key:
        complaints.append(f"was told {part.raised!r}, and not {fault.raises.__name__}")
    return "; ".join(complaints)
