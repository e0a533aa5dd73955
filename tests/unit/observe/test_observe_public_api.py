"""The public names of the package, and the modules that importing it loads."""

from __future__ import annotations

import subprocess
import sys

import pytest

from millstream import observe


def test_public_names_are_documented_ones() -> None:
    assert {"ServiceMetrics", "ServiceMonitor", "StreamStatsCollector"} <= set(observe.__all__)
    assert [name for name in observe.__all__ if getattr(observe, name).__name__ != name] == []
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        observe.Nothing  # noqa: B018  # asking is the test


def test_package_imports_no_http_server_until_it_is_used() -> None:
    code = "import sys, millstream.observe, millstream.observe.streams; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"starlette", "uvicorn", "prometheus_client"} & set(loaded)
