"""Imports: a program loads only what it uses."""

from __future__ import annotations

import subprocess
import sys

import millstream


def imported_after(code: str) -> set[str]:
    """Top-level packages that a fresh interpreter has after running it."""
    program = f"{code}\nimport sys\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


def test_importing_the_package_loads_no_dependency() -> None:
    assert not imported_after("import millstream") & {"redis", "hiredis", "yaml", "pyspark", "pydantic", "asyncio"}


def test_embedded_broker_imports_no_redis_client() -> None:
    code = "import millstream\nwith millstream.open_blocking_broker('local://') as b: b.xadd('s', {'n': 1})"

    assert not imported_after(code) & {"redis", "yaml", "pyspark", "pydantic"}


def test_public_names() -> None:
    for name in millstream.__all__:
        assert getattr(millstream, name) is not None
    assert set(millstream.__all__) <= set(dir(millstream))
