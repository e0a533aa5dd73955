"""Which part of a log two timelines have in common, from literal history files."""

from __future__ import annotations

import pytest

from millstream.cdc.errors import PositionLost
from millstream.cdc.postgres.timeline import end_of_timeline, refuse_other_history

HISTORY = "1\t0/3000060\tno recovery target specified\n\n2\t1/A0\tbefore 2026-01-01 00:00:00+00\n"


@pytest.mark.parametrize(("timeline", "end"), [(1, 0x3000060), (2, (1 << 32) + 0xA0), (3, None), (11, None)])
def test_history_file_has_the_end_of_each_earlier_timeline(timeline: int, end: int | None) -> None:
    assert end_of_timeline(HISTORY, timeline) == end


@pytest.mark.parametrize(("end", "position"), [(100, 100), (100, 99)])
def test_position_in_the_common_part_is_accepted(end: int, position: int) -> None:
    refuse_other_history("server", 1, 2, end, position)


@pytest.mark.parametrize("end", [99, None])
def test_position_outside_the_common_part_is_lost(end: int | None) -> None:
    with pytest.raises(PositionLost, match="timeline 2"):
        refuse_other_history("server", 1, 2, end, 100)
