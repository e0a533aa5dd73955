"""The end of a delivery: acknowledged, put off, handed back, buried, or answered with outputs."""

from millstream.broker.steps.settle.call import (
    Output,
    Settled,
    ack_held,
    ack_with_outputs,
    bury,
    count_delivery,
    delay,
    hand_back,
    heartbeat,
    shares_slot,
)

__all__ = [
    "Output",
    "Settled",
    "ack_held",
    "ack_with_outputs",
    "bury",
    "count_delivery",
    "delay",
    "hand_back",
    "heartbeat",
    "shares_slot",
]
