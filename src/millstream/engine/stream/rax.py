"""How many nodes Redis's radix tree has for a set of keys, without building it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

KEY_BYTES: Final = 16


def count_nodes(keys: Sequence[int]) -> int:
    """``keys`` are 16-byte numbers in ascending order.

    The tree has a leaf for each key, a node wherever keys part, and one for each stretch of bytes between them: a
    stretch of any length is one node, because Redis compresses it, and a parting takes the byte after it with it.
    """
    if not keys:
        return 1
    leaves, partings, stretches = len(keys), 0, 0
    open_partings: list[int] = []  # depths on the way to the last key, ascending
    previous = keys[0]
    for key in keys[1:]:
        depth = KEY_BYTES - ((previous ^ key).bit_length() + 7) // 8
        below = KEY_BYTES
        while open_partings and open_partings[-1] > depth:
            parting = open_partings.pop()
            stretches += below - parting > 1
            below = parting
        stretches += below - depth > 1
        if not open_partings or open_partings[-1] < depth:
            open_partings.append(depth)
            partings += 1
        previous = key
    below = KEY_BYTES
    while open_partings:
        parting = open_partings.pop()
        stretches += below - parting > 1
        below = parting
    return leaves + partings + stretches + (below > 0)
