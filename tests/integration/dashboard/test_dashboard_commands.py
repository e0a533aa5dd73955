"""The commands that bring a dashboard: they say where it is, show what it belongs to, and end when they are told."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from millstream import open_blocking_broker

TOKEN = "s3cret-token"


@contextmanager
def started(*words: str, lines: int = 1, stderr: Path | None = None) -> Iterator[list[str]]:
    """The command's first lines, while it runs; then it is told to end, and does."""
    environment = {name: value for name, value in os.environ.items() if name != "MILLSTREAM_HTTP_TOKEN"}
    command = [sys.executable, "-m", "millstream", *words]
    with (
        open(stderr or os.devnull, "w") as noise,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=noise, text=True, env=environment) as process,
    ):
        try:
            assert process.stdout is not None
            yield [process.stdout.readline() for _ in range(lines)]
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()


def address_in(text: str) -> str:
    found = re.search(r"http://\S+", text)
    assert found is not None, text
    return found[0]


def test_serve_brings_a_dashboard_of_itself_along(tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_text("p@ss/word")
    words = ("serve", "--port", "0", "--password-file", str(secret), "--dashboard", "--dashboard-port", "0")
    with started(*words, lines=2) as (greeting, told):
        found = re.search(r"127\.0\.0\.1:(\d+)", greeting)
        assert found is not None
        with open_blocking_broker(f"redis://:p%40ss%2Fword@127.0.0.1:{found[1]}") as broker:
            broker.xadd("orders", {"n": "1"})
        page = httpx.get(address_in(told))
        assert ">orders</a>" in page.text
        assert "word" not in page.text.replace("password", "")


def test_the_dashboard_is_a_command_that_tells_its_address_and_ends_quietly_while_pages_are_open(
    redis_url: str, tmp_path: Path
) -> None:
    noise = tmp_path / "stderr"
    with started("dashboard", "--url", redis_url, "--port", "0", stderr=noise) as (told,):
        at = address_in(told)
        assert httpx.get(at).status_code == 200
        listening = httpx.Client(timeout=60)
        page = listening.send(listening.build_request("GET", f"{at}/live?page=/"), stream=True)
        assert next(page.iter_lines()) == "event: connection"
    page.close()
    listening.close()
    assert noise.read_text() == ""


def test_off_loopback_it_starts_with_a_token_alone(redis_url: str, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "millstream", "dashboard", "--url", redis_url, "--host", "0.0.0.0", "--port", "0"]
    environment = {name: value for name, value in os.environ.items() if name != "MILLSTREAM_HTTP_TOKEN"}
    refused = subprocess.run(words, capture_output=True, text=True, env=environment, check=False, timeout=60)
    assert refused.returncode == 1
    assert "refusing to answer on 0.0.0.0 without a token" in refused.stderr
    assert "--token-file" in refused.stderr

    file = tmp_path / "token"
    file.write_text(TOKEN)
    with started(*words[3:], "--token-file", str(file)) as (told,):
        url = address_in(told)
        assert httpx.get(url).status_code == 401
        page = httpx.get(url, headers={"authorization": f"Bearer {TOKEN}"})
        assert "read only" in page.text
        assert TOKEN not in page.text
