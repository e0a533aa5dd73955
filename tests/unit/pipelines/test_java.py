"""The check of Java before Spark starts: one sentence with the problem and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.observe import Severity
from millstream.observe.diagnose import examine_machine
from millstream.pipelines.session import java_problem

NEW = 'openjdk version "21.0.2" 2024-01-16'


def install(at: Path, script: str) -> None:
    at.parent.mkdir(parents=True, exist_ok=True)
    at.write_text(f"#!/bin/sh\n{script}\n")
    at.chmod(0o755)


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with an empty PATH, and without a Java."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    return tmp_path


def test_missing_java_is_reported() -> None:
    assert java_problem() == (
        "Spark needs Java 17 or newer, and no Java is installed. Install it: apt-get install openjdk-17-jre-headless"
    )


@pytest.mark.parametrize("output", [NEW, 'openjdk version "17" 2021-09-14', 'java version "25-ea" 2025-09-16'])
def test_suitable_java_is_accepted(machine: Path, output: str) -> None:
    install(machine / "bin" / "java", f"echo '{output}' >&2")
    assert java_problem() is None


@pytest.mark.parametrize(
    ("printed", "version"), [('java version "1.8.0_392"', "8"), ('openjdk version "11.0.2"', "11")]
)
def test_java_that_is_too_old_is_reported(machine: Path, printed: str, version: str) -> None:
    install(machine / "bin" / "java", f"echo '{printed}' >&2")
    assert f"java is {version}. Install it" in (java_problem() or "")


@pytest.mark.parametrize(
    ("script", "reported"),
    [
        ("echo 'Error: could not open libjvm.so' >&2; exit 1", "exit code 1: Error: could not open libjvm.so"),
        (
            "echo 'Picked up JAVA_TOOL_OPTIONS: -Xmx1' >&2; echo 'Too small heap' >&2; exit 1",
            "exit code 1: Too small heap",
        ),
        ("exit 0", "exit code 0: no output"),
    ],
)
def test_java_that_does_not_start_is_reported(machine: Path, script: str, reported: str) -> None:
    install(machine / "bin" / "java", script)
    assert f"does not start ({reported}), and Spark needs it." in (java_problem() or "")


def test_java_home_has_priority_as_in_spark(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(machine / "bin" / "java", f"echo '{NEW}' >&2")
    monkeypatch.setenv("JAVA_HOME", str(machine / "jdk"))
    assert java_problem() == (
        f"JAVA_HOME is {machine / 'jdk'}, which has no bin/java. Unset it, or set it to a Java 17 or newer."
    )
    install(machine / "jdk" / "bin" / "java", "echo 'java version \"1.8.0\"' >&2")
    assert "is 8. Set JAVA_HOME to another Java." in (java_problem() or "")
    install(machine / "jdk" / "bin" / "java", f"echo '{NEW}' >&2")
    assert java_problem() is None


def test_doctor_examines_the_java_that_spark_would_run(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JAVA_HOME has priority over PATH: a suitable Java in PATH is not used."""
    install(machine / "bin" / "java", f"echo '{NEW}' >&2")
    install(machine / "old" / "bin" / "java", """echo 'openjdk version "11.0.2"' >&2""")

    [fine] = [item for item in examine_machine() if item.what == "Java"]
    monkeypatch.setenv("JAVA_HOME", str(machine / "old"))
    [old] = [item for item in examine_machine() if item.what == "Java"]

    assert fine.level is Severity.ok
    assert old.level is Severity.warning
    assert old.remedy == java_problem()
