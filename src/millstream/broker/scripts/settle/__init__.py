"""Settling deliveries: acknowledge, delay, return unstarted, dead-letter, or acknowledge with outputs."""

from millstream.broker.scripts.settle.call import (
    Output,
    Settled,
    ack_held,
    ack_streams,
    ack_with_outputs,
    count_delivery,
    dead_letter,
    delay,
    heartbeat,
    return_unstarted,
    shares_slot,
)

__all__ = [
    "Output",
    "Settled",
    "ack_held",
    "ack_streams",
    "ack_with_outputs",
    "count_delivery",
    "dead_letter",
    "delay",
    "heartbeat",
    "return_unstarted",
    "shares_slot",
]
