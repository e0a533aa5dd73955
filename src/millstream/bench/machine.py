"""What a figure depends on: the machine and the versions, without names or paths."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata
from typing import Any

_PACKAGES = ("millstream", "redis", "hiredis", "pyspark", "pyarrow", "fakeredis", "faststream")


def machine() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "arch": platform.machine(),
        "python": platform.python_version(),
        "redis_server": _redis_server_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _redis_server_version() -> str | None:
    binary = shutil.which("redis-server")
    if binary is None:
        return None
    words = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout.split()
    return next((word[2:] for word in words if word.startswith("v=")), None)
