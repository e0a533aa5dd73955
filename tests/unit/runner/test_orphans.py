"""As process 1, the supervisor waits for ended orphans, and leaves its own workers to asyncio."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from millstream.runner.supervisor import reap_orphans

PROCESS_ONE = """
import os, subprocess, sys, time
from millstream.runner.supervisor import reap_orphans
assert os.getpid() == 1
subprocess.run([sys.executable, "-c", "import os; os.fork() or os._exit(0)"], check=True)  # its child is ours now
deadline = time.monotonic() + 30
while not reap_orphans(set()) and time.monotonic() < deadline:
    time.sleep(0.01)
print("reaped", time.monotonic() < deadline)
"""

WORKER_THAT_ENDS_WHILE_IT_STARTS = """
import asyncio, os, signal, subprocess, sys
from millstream.runner import supervisor

os.getpid = lambda: 1
supervisor.POLL_S = 0  # it looks for orphans in every turn of the event loop

async def subprocess_exec(*arguments, **options):
    child = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    for _ in range(100):
        await asyncio.sleep(0)
    print("exit code", child.wait(), flush=True)
    signal.raise_signal(signal.SIGTERM)
    raise OSError("the test ends here")

async def main():
    asyncio.get_running_loop().subprocess_exec = subprocess_exec
    await supervisor.Supervisor(supervisor.SupervisorSettings("app:router")).run()

asyncio.run(main())
"""


def test_ended_orphans_are_waited_for_and_workers_are_not() -> None:
    child = os.fork()
    if child == 0:
        os._exit(3)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert child not in reap_orphans({child})
    assert os.waitpid(child, 0)[1] >> 8 == 3, "its exit code was left for its parent code"


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare to be process 1")
def test_process_1_leaves_no_zombies() -> None:
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", PROCESS_ONE]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode != 0 and "unshare" in done.stderr:
        pytest.skip(f"this machine gives no process namespace: {done.stderr.strip()}")
    assert done.stdout == "reaped True\n", done.stderr


def test_exit_code_of_a_worker_that_ends_while_it_starts_is_left_to_asyncio() -> None:
    """Its process id is known to the supervisor only after ``subprocess_exec`` has returned."""
    words = [sys.executable, "-c", WORKER_THAT_ENDS_WHILE_IT_STARTS]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "exit code 3\n", done.stderr
