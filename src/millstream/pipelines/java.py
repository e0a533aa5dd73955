"""The Java that Spark's own script would run: whether there is one, whether it starts, whether it is new enough."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

OLDEST: Final = 17
INSTALL: Final = "Install it: apt-get install openjdk-17-jre-headless"
_PATIENCE_S: Final = 60.0


def java_problem() -> str | None:
    """What is wrong with it and what to do, in one sentence for people; None where Spark can run on it."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if java is None:
        return f"Spark needs Java {OLDEST} or newer, and there is none. {INSTALL}"
    if not os.access(java, os.X_OK):
        return f"JAVA_HOME is {home}, where no bin/java is. Unset it, or let it name a Java of {OLDEST} or newer."
    mend = "Let JAVA_HOME name another." if home else f"{INSTALL}, or let JAVA_HOME name another."
    try:
        asked = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{java} does not start ({error}), and Spark needs it. {mend}"
    lines = [line.strip() for line in (asked.stderr + asked.stdout).splitlines() if not line.startswith("Picked up ")]
    said = next(filter(None, lines), "no word")
    version = re.search(r'version "(?:1\.)?(\d+)', asked.stderr + asked.stdout)
    if asked.returncode or version is None:
        return f"{java} does not start (exit code {asked.returncode}: {said[:200]}), and Spark needs it. {mend}"
    if int(version[1]) < OLDEST:
        return f"Spark needs Java {OLDEST} or newer, and {java} is {version[1]}. {mend}"
    return None
