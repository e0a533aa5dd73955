"""Options that all change sources share."""

from __future__ import annotations

import pytest

from millstream.cdc.options import read_options


@pytest.mark.parametrize(
    ("configured", "path"),
    [
        ("/data/segments/", "/data/segments"),
        ("file:///data/segments", "/data/segments"),
        ("file:///data/a%20b", "/data/a b"),
        ("hdfs://namenode/data", "hdfs://namenode/data"),
    ],
)
def test_segments_are_a_path_or_a_uri(configured: str, path: str) -> None:
    assert read_options({"tables": "orders", "segments": configured}, "s").segments == path
