"""Moving the position of a consumer group, restoring a deleted group, and deleting a consumer."""

from millstream.broker.scripts.groups.call import (
    advance_group,
    advance_groups,
    delete_consumer,
    recreated_ago_ms,
    restore_group,
)

__all__ = ["advance_group", "advance_groups", "delete_consumer", "recreated_ago_ms", "restore_group"]
