"""Consumer groups that move: forward with a reader, back after a loss, and a consumer that leaves."""

from millstream.broker.steps.groups.call import advance_group, delete_consumer, put_group_back

__all__ = ["advance_group", "delete_consumer", "put_group_back"]
