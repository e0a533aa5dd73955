"""Consumer groups that move: forward with a reader, back after a loss, and a consumer that leaves."""

from millstream.broker.steps.groups.call import advance_group, delete_consumer, made_again_ago_ms, put_group_back

__all__ = ["advance_group", "delete_consumer", "made_again_ago_ms", "put_group_back"]
