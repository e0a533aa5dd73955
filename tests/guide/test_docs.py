"""The code in the documentation runs: Python and shell as written, pipelines as the validator reads them.

A page's Python blocks run one after the other in one process, as a reader would type them; so do its ``bash`` blocks.
What cannot run by itself (output, other languages, fragments) is fenced as ``text`` or under its own language.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from millstream.testing import RedisProcess

ROOT = Path(__file__).parents[2]
ELSEWHERE = {ROOT / "docs/how-to/spark.md"}
"""Pages whose Python needs a session that is there already: tests/spark runs them."""
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    if language == "python" and page in ELSEWHERE:
        return []
    return [text for found, text in BLOCK.findall(page.read_text()) if found == language]


def named(pages: list[Path]) -> list[object]:
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages]


def needs_spark(page: Path) -> bool:
    return any("pyspark" in text or "millstream pipeline run" in text for _, text in BLOCK.findall(page.read_text()))


PRINTED = re.compile(r"^```python\n.*?^```\n\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SAID = re.compile(r"[Ii]t prints `([^`]+)`")


def printed(page: Path) -> list[str]:
    """What the page says that its Python prints: a ``text`` block right behind it, or the words "it prints"."""
    text = page.read_text()
    return [*PRINTED.findall(text), *SAID.findall(text)]


def run(words: list[str], text: str, redis: RedisProcess, directory: Path) -> str:
    environment = {
        **os.environ,
        "MILLSTREAM_URL": redis.url,
        "REDIS_URI": redis.url,
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": str(directory),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    done = subprocess.run(
        words, input=text, text=True, cwd=directory, env=environment, capture_output=True, timeout=240, check=False
    )
    assert done.returncode == 0, f"{text}\n--- output\n{done.stdout}\n--- errors\n{done.stderr}"
    return done.stdout


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", named([page for page in PAGES if blocks(page, "python") and not needs_spark(page)]))
def test_python_runs(page: Path, redis_server: RedisProcess, tmp_path: Path) -> None:
    shown = run([sys.executable, "-"], "\n".join(blocks(page, "python")), redis_server, tmp_path)
    for told in printed(page):
        assert told in shown


@pytest.mark.spark
@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", named([page for page in PAGES if blocks(page, "python") and needs_spark(page)]))
def test_python_on_spark_runs(page: Path, redis_server: RedisProcess, tmp_path: Path) -> None:
    shown = run([sys.executable, "-"], "\n".join(blocks(page, "python")), redis_server, tmp_path)
    for told in printed(page):
        assert told in shown


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", named([page for page in PAGES if blocks(page, "bash")]))
def test_shell_runs(page: Path, redis_server: RedisProcess, tmp_path: Path) -> None:
    run(["bash", "-e"], "\n".join(blocks(page, "bash")), redis_server, tmp_path)


@pytest.mark.parametrize("page", named([page for page in PAGES if blocks(page, "yaml")]))
def test_pipelines_are_valid(page: Path, redis_server: RedisProcess, tmp_path: Path) -> None:
    (tmp_path / "my_functions.py").write_text("def enrich(batch):\n    return batch\n")
    for number, text in enumerate(blocks(page, "yaml")):
        if "kind: Pipeline" in text:
            (tmp_path / f"{number}.yaml").write_text(text)
            run(["millstream", "pipeline", "validate", f"{number}.yaml"], "", redis_server, tmp_path)


def test_links_between_pages_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert not broken
