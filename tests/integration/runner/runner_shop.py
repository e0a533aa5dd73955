"""A worker module as a user writes it, for the tests of ``millstream run``."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from millstream import Broker, Message, Router
from millstream.messaging import Backoff

router = Router(claim_min_idle_ms=1_000, claim_interval_ms=200, max_deliveries=20, backoff=Backoff(initial_ms=50))
not_runnable = 5


@router.on("orders", group="billing", group_start="0", publish_to="billed")
async def bill(message: Message) -> Message:
    await asyncio.sleep(float(os.environ.get("WORK_S", "0.005")))
    return Message(f"{message.payload.decode()} {os.getpid()}".encode())


slow_to_claim = Router(claim_min_idle_ms=3_600_000, claim_interval_ms=200)
named = Router(claim_min_idle_ms=3_600_000, claim_interval_ms=200, consumer="chosen")
named_by_process = Router(consumer=f"worker-{os.getpid()}")


async def deliver(message: Message) -> Message:
    """Holds every message while hold.txt exists."""
    while os.path.exists("hold.txt"):  # a test removes it from another process
        await asyncio.sleep(0.02)
    return Message(f"{message.payload.decode()} {os.getpid()}".encode())


slow_to_claim.add(deliver, "orders", group="billing", group_start="0", publish_to="billed")
named.add(deliver, "orders", group="billing", group_start="0", publish_to="billed")
named_by_process.add(deliver, "orders", group="billing", group_start="0", publish_to="billed")


def make(broker: Broker) -> Router:
    whole = Router(broker)
    whole.include(router)
    return whole


@asynccontextmanager
async def opened(broker: Broker) -> AsyncIterator[list[Router]]:
    yield [make(broker)]


terminating = Router(claim_min_idle_ms=3_600_000, claim_interval_ms=200)


async def terminate_a_child(message: Message) -> Message:
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    child.start()
    child.terminate()
    await asyncio.to_thread(child.join)
    return Message(f"{child.exitcode} {os.getpid()}".encode())


terminating.add(terminate_a_child, "orders", group="billing", group_start="0", publish_to="billed")


def wrong_option(broker: Broker) -> Router:
    whole = Router(broker)
    whole.add(bill, "orders", group="g", group_start="0", max_in_flight=0)
    return whole


def with_a_child(broker: Broker) -> Router:
    """Its forked child holds every descriptor of the worker, as a worker of ProcessPoolExecutor does."""
    child = os.fork()
    if child == 0:
        os.setsid()
        signal.pause()
    with open("children.txt", "a") as children:
        children.write(f"{child}\n")
    return make(broker)


def with_a_long_line(broker: Broker) -> Router:
    raise RuntimeError("x" * (3 << 20))


def with_an_exit_code(broker: Broker) -> Router:
    """A program may use any exit code for something of its own."""
    os._exit(78)


def blocked_while_opening(broker: Broker) -> Router:
    time.sleep(600)
    return make(broker)


blocking = Router(claim_min_idle_ms=3_600_000, claim_interval_ms=200)


async def block(message: Message) -> None:
    time.sleep(600)  # blocks the event loop


blocking.add(block, "orders", group="billing", group_start="0")

noisy = Router()


@noisy.on("orders", group="billing", group_start="0", publish_to="billed")
async def bill_noisily(message: Message) -> Message:
    logging.getLogger("shop").warning("billed %s %s", message.payload.decode(), "x" * 4_000)
    return Message(f"{message.payload.decode()} {os.getpid()}".encode())
