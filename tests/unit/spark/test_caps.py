"""What a hard cap takes unread is counted by the slowest group."""

from millstream.spark.caps import undelivered


def look(added: int, length: int) -> dict[bytes, int]:
    return {b"entries-added": added, b"length": length}


def group(read: int | None) -> dict[bytes, int | None]:
    return {b"entries-read": read}


def test_only_what_the_slowest_group_had_not_read_counts():
    assert undelivered(look(100, 100), [group(40), group(90)], look(100, 30)) == 30
    assert undelivered(look(100, 100), [group(80)], look(100, 30)) == 0
    assert undelivered(look(100, 50), [group(10)], look(100, 30)) == 20
    assert undelivered(look(100, 100), [], look(100, 30)) == 0
    assert undelivered(look(100, 100), [group(None)], look(100, 30)) == 0
