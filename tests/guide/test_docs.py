"""The code in the documentation runs: Python and shell as written, pipelines as the validator reads them.

The Python blocks of a page run in order in one process, and so do its ``bash`` blocks. Blocks that cannot run by
themselves (output, other languages, fragments) are fenced as ``text`` or as their own language.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from millstream.testing import RedisProcess, wait_until

ROOT = Path(__file__).parents[2]
ELSEWHERE = {ROOT / "docs/how-to/spark.md"}
"""Pages whose Python needs a session that is there already: tests/spark runs them."""
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    if language == "python" and page in ELSEWHERE:
        return []
    return [text for item, text in BLOCK.findall(page.read_text()) if item == language]


def named(pages: list[Path]) -> list[object]:
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages]


def needs_spark(page: Path) -> bool:
    return any("pyspark" in text or "millstream pipeline run" in text for _, text in BLOCK.findall(page.read_text()))


PRINTED = re.compile(r"^```python\n.*?^```\n\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SAID = re.compile(r"[Ii]t prints `([^`]+)`")


def printed(page: Path) -> list[str]:
    """The documented output of a Python block: the ``text`` block after it, or the words "it prints"."""
    text = page.read_text()
    return [*PRINTED.findall(text), *SAID.findall(text)]


def run(words: list[str], text: str, redis: RedisProcess, directory: Path) -> str:
    environment = {
        **os.environ,
        "MILLSTREAM_URL": redis.url,
        "REDIS_URI": redis.url,
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join([str(directory), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    done = subprocess.run(
        words, input=text, text=True, cwd=directory, env=environment, capture_output=True, timeout=240, check=False
    )
    assert done.returncode == 0, f"{text}\n--- output\n{done.stdout}\n--- errors\n{done.stderr}"
    assert "option group is not set" not in done.stderr, "an example must not trigger our own warning"
    return done.stdout


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", named([page for page in PAGES if blocks(page, "python") and not needs_spark(page)]))
def test_python_runs(page: Path, redis_server: RedisProcess, tmp_path: Path) -> None:
    output = run([sys.executable, "-"], "\n".join(blocks(page, "python")), redis_server, tmp_path)
    for line in printed(page):
        assert line in output


TUTORIAL = ROOT / "docs/tutorial.md"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", range(len(blocks(TUTORIAL, "python"))))
def test_each_part_of_the_tutorial_runs_by_itself(part: int, redis_server: RedisProcess, tmp_path: Path) -> None:
    run([sys.executable, "-"], blocks(TUTORIAL, "python")[part], redis_server, tmp_path)


FASTAPI_PAGE = ROOT / "docs/how-to/fastapi.md"


def connections_and_publishers(redis: RedisProcess) -> tuple[int, int]:
    """How many connections Redis has accepted, without this one, and how many publishers have left a key."""
    with Redis.from_url(redis.url) as client:
        accepted = int(client.info("stats")["total_connections_received"])
        return accepted, len(client.keys("{orders}.once:*"))


@pytest.mark.timeout(120)
def test_requests_of_the_fastapi_page_share_one_broker_and_publisher(
    redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLSTREAM_URL", redis_server.url)
    [code] = blocks(FASTAPI_PAGE, "python")
    assert "MILLSTREAM_URL" in code, "the page must run on Redis"
    page: dict[str, Any] = {"__name__": "fastapi_page"}
    exec(compile(code, "fastapi.md", "exec"), page)
    with Redis.from_url(redis_server.url) as redis:
        redis.flushall()
    with page["TestClient"](page["app"]) as client:
        assert client.post("/orders", content=b"warm up").json() == {"stored": True}
        wait_until(lambda: "warm up" in page["billed"], what="the first order to be handled")
        accepted, publishers = connections_and_publishers(redis_server)
        assert publishers == 1
        for number in range(50):
            assert client.post("/orders", content=f"request {number}").json() == {"stored": True}
        wait_until(lambda: "request 49" in page["billed"], what="the last order to be handled")
        later, publishers = connections_and_publishers(redis_server)
    assert publishers == 1
    # The connection that reads these numbers counts too. The router may open a few more, never one for each request.
    assert later - accepted <= 5


@pytest.mark.spark
@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", named([page for page in PAGES if blocks(page, "python") and needs_spark(page)]))
def test_python_on_spark_runs(page: Path, redis_server: RedisProcess, tmp_path: Path) -> None:
    output = run([sys.executable, "-"], "\n".join(blocks(page, "python")), redis_server, tmp_path)
    for line in printed(page):
        assert line in output


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


def test_no_link_between_pages_is_broken() -> None:
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert not broken


def test_no_page_installs_from_a_package_index() -> None:
    """There is no release: a page must say how to install from a checkout or a wheel."""
    pages = [*PAGES, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "examples").rglob("*.*"))]
    promised = [
        f"{page.relative_to(ROOT)}: {line.strip()}"
        for page in pages
        for line in page.read_text().splitlines()
        if re.search(r"(pip install|uv add|poetry add) [^`]*?(?<![/\w-])millstream(?![-/\w])", line)
    ]
    assert not promised
