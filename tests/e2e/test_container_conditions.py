"""The commands of the images under the conditions of a hardened container, without an image: an unprivileged user
without a home, a read-only file system, no capabilities, and the worker as process 1.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from millstream.testing import RedisProcess, free_port, wait_until

ROOT = Path(__file__).parents[2]
USER = 10001


def can_unshare() -> bool:
    if os.getuid() != 0 or not all(map(shutil.which, ("unshare", "setpriv", "mount"))):
        return False
    probe = ["unshare", "--mount", "sh", "-c", "mount --bind / / && mount -o remount,ro,bind /"]
    return subprocess.run(probe, capture_output=True, timeout=30, check=False).returncode == 0


pytestmark = [
    pytest.mark.skipif(not can_unshare(), reason="needs root, unshare, setpriv, and the right to mount"),
    pytest.mark.timeout(300),
]


def reachable(place: Path, scratch: Path) -> list[str]:
    """Shell lines that make a directory below a private one (such as /root) reachable for another user."""
    closed = [parent for parent in reversed(place.parents) if not parent.stat().st_mode & 0o001]
    if not closed:
        return []
    keep = scratch / place.name
    lines = [f"mkdir -p {keep}", f"mount --rbind {place} {keep}", f"mount -t tmpfs -o mode=755 tmpfs {closed[0]}"]
    return [*lines, f"mkdir -p {place}", f"mount --rbind {keep} {place}"]


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory that another user can read. Those of pytest are closed to others whenever a pytest starts."""
    with tempfile.TemporaryDirectory(prefix="millstream-") as created:
        os.chmod(created, 0o755)
        yield Path(created)


@pytest.fixture
def contained(directory: Path) -> list[str]:
    """The words that start a command under the conditions of a hardened container."""
    base = Path(os.path.realpath(sys.executable)).parents[1]
    lines = [
        "set -e",
        "mount --make-rprivate /",
        *reachable(base, directory / "keep"),
        "mount --bind / / 2>/dev/null",
        "mount -o remount,ro,bind /",
        "cd " + shlex.quote(str(directory)),
        f'exec setpriv --reuid={USER} --regid={USER} --clear-groups --no-new-privs --bounding-set=-all -- "$@"',
    ]
    return ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", "\n".join(lines), "sh"]


def environment(**more: str) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1", **more}


def end(process: subprocess.Popen[bytes]) -> None:
    """Kills the command, and with it everything in its process namespace. ``--kill-child`` does not: the kernel forgets
    the signal that it sets when the user changes."""
    if process.poll() is None:
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
        process.kill()
        process.wait(10)


def get(port: int, path: str, **headers: str) -> int:
    try:
        with urlopen(Request(f"http://127.0.0.1:{port}{path}", headers=headers), timeout=5) as answer:
            return int(answer.status)
    except HTTPError as error:
        return error.code
    except OSError:
        return 0


def test_tree_is_read_only_and_the_user_unprivileged(contained: list[str], directory: Path) -> None:
    script = f"id -u; touch {directory}/x 2>&1; touch /etc/x 2>&1; true"
    done = subprocess.run([*contained, "sh", "-c", script], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.splitlines()[0] == str(USER)
    assert not (directory / "x").exists()
    assert "Read-only file system" in done.stdout


def test_worker_reads_and_stops_as_process_1(contained: list[str], directory: Path, redis_server: RedisProcess) -> None:
    shutil.copy(ROOT / "deploy" / "example" / "shop.py", directory)
    port, log = free_port(), directory / "log.txt"
    words = [sys.executable, "-m", "millstream", "run", "shop:router", "--processes", "2"]
    env = environment(MILLSTREAM_URL=redis_server.url, MILLSTREAM_LOG_FORMAT="json")
    env |= {"MILLSTREAM_METRICS_PORT": str(port), "MILLSTREAM_HEALTH_PORT": str(port)}
    with log.open("w") as out:
        process = subprocess.Popen([*contained, *words], env=env, stdout=out, stderr=out)
    try:
        wait_until(lambda: get(port, "/ready") == 200 or process.poll() is not None, timeout_s=200)
        assert process.poll() is None, log.read_text()
        assert get(port, "/metrics") == 200
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{children[0]}/status").read_text().splitlines())
        assert status["NSpid"].split()[-1] == "1"
        assert status["Uid"].split()[0] == str(USER)
        os.kill(int(children[0]), 15)
        assert process.wait(60) == 0, log.read_text()
    finally:
        end(process)
    assert "all workers have ended" in log.read_text()


def test_dashboard_answers_its_probe_under_any_host_name(
    contained: list[str], directory: Path, redis_server: RedisProcess
) -> None:
    port, log = free_port(), directory / "log.txt"
    words = [sys.executable, "-m", "millstream", "dashboard", "--host", "0.0.0.0", "--port", str(port)]
    env = environment(MILLSTREAM_URL=redis_server.url, MILLSTREAM_HTTP_TOKEN="a-token-of-the-test")
    with log.open("w") as out:
        process = subprocess.Popen([*contained, *words], env=env, stdout=out, stderr=out)
    try:
        wait_until(
            lambda: get(port, "/login", Host=f"10.0.0.7:{port}") == 200 or process.poll() is not None, timeout_s=200
        )
        assert process.poll() is None, log.read_text()
    finally:
        end(process)
