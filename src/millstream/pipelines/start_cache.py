"""Files in the user's cache directory that make Spark start faster: a Spark home without zipped modules, and an archive
of Java classes.

``home`` is a directory of links to the installed Spark. It leaves out the zip archive of Spark's Python modules. Spark
puts that archive first on the path of every Python process that it starts, and each process then compiles the modules
again. Without the archive, the processes import the installed modules, which are compiled once.

``classes.jsa`` is an archive for Java's class data sharing: Java maps it into memory instead of parsing and verifying
25,000 classes. It is created by running small pipelines (``create``), which takes about half a minute.

Both are optional. If the directory cannot be used, Spark starts without them. Java loads code from the archive, so the
directories must belong to this user or to root, and only the owner may write to them. An archive whose size or time
has changed is not used, because Java crashes on a truncated one; Java verifies the checksums of its contents.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from millstream.errors import MillstreamError

SWITCH: Final = "MILLSTREAM_START_CACHE"
_LINKED: Final = ("bin", "sbin", "jars", "conf", "data", "licenses", "LICENSE", "NOTICE", "RELEASE")
_JAVA_EXIT_S: Final = 300.0

JIT_OPTIONS: Final = (
    "-XX:+IgnoreUnrecognizedVMOptions",
    # Forty times the default thresholds of the optimizing compiler. Code that runs for a few seconds is not optimized,
    # which costs as much as running it. Code that runs once per row is, after some hundred thousand rows.
    "-XX:Tier4InvocationThreshold=200000",
    "-XX:Tier4MinInvocationThreshold=24000",
    "-XX:Tier4CompileThreshold=600000",
    "-XX:Tier4BackEdgeThreshold=1600000",
)


class ArchiveNotCreated(MillstreamError):
    """Java wrote no class archive. Pipelines start without it."""


@dataclass(frozen=True, slots=True)
class StartCache:
    """One directory for one combination of Java, Spark and millstream."""

    directory: Path

    @property
    def home(self) -> Path:
        return self.directory / "home"

    @property
    def archive(self) -> Path:
        return self.directory / "classes.jsa"

    @property
    def _manifest(self) -> Path:
        return self.directory / "classes.json"

    @property
    def _failure(self) -> Path:
        return self.directory / "failed"

    def environment(self) -> dict[str, str]:
        """The variables for Spark's launcher. The user's own Java options come last, so that they win."""
        options = list(JIT_OPTIONS)
        if self.is_ready():
            options += [f'"-XX:SharedArchiveFile={self.archive}"', "-XX:+VerifySharedSpaces", "-Xlog:cds*=off"]
        return self._variables(options)

    def _variables(self, options: list[str]) -> dict[str, str]:
        own = os.environ.get("SPARK_SUBMIT_OPTS", "")
        return {"SPARK_HOME": str(self.home), "SPARK_SUBMIT_OPTS": " ".join([*options, own]).strip()}

    def is_ready(self) -> bool:
        """Whether the archive exists and has not changed since it was created."""
        try:
            recorded = json.loads(self._manifest.read_bytes())
            status = self.archive.lstat()
        except (OSError, ValueError, RecursionError):
            return False
        return _is_safe(status, stat.S_ISREG) and recorded == _identity(status)

    def needs_archive(self) -> bool:
        """Whether to try to create an archive: there is none, the last try did not fail, and it can be stored."""
        return not self.is_ready() and not self._failure.exists() and os.access(self.directory, os.W_OK)

    def create(self) -> bool:
        """Create the archive by running small pipelines. Starts Spark, so the process must not have started it before.

        Returns False if another process is creating it. Raises ArchiveNotCreated.
        """
        with self._lock() as locked:
            if not locked:
                return False
            for leftover in self.directory.glob("classes.[0-9]*"):
                leftover.unlink()  # of a process that was killed
            part = self.directory / f"classes.{os.getpid()}"
            try:
                _train(self._variables([*JIT_OPTIONS, f'"-XX:ArchiveClassesAtExit={part}"', "-Xlog:cds*=off"]))
                identity = _identity(part.stat())
                part.replace(self.archive)  # atomic: a JVM that starts now finds the old archive or the new one
                self._manifest.write_text(json.dumps(identity), encoding="utf-8")
                self._failure.unlink(missing_ok=True)
            except Exception as error:  # of Spark, py4j or the file system: the reason is kept for `doctor`
                why = f"{type(error).__name__}: {error}"
                with suppress(OSError):
                    self._failure.write_text(why, encoding="utf-8")
                raise ArchiveNotCreated(f"Java wrote no class archive: {why}") from error
            finally:
                part.unlink(missing_ok=True)
        return True

    def create_in_background(self) -> None:
        """Start a process of low priority that creates the archive, and do not wait for it."""
        command = [sys.executable, "-m", "millstream", "pipeline", "prepare"]
        nothing = subprocess.DEVNULL
        with suppress(OSError):
            subprocess.Popen(
                ["nice", "-n", "19", *command] if shutil.which("nice") else command,
                stdin=nothing,
                stdout=nothing,
                stderr=nothing,
                cwd=self.directory,
                start_new_session=True,
            )

    @contextmanager
    def _lock(self) -> Iterator[bool]:
        try:
            opened = (self.directory / "lock").open("a")
        except OSError as error:
            raise ArchiveNotCreated(f"{self.directory} cannot be written: {error}") from error
        with opened as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True


def start_cache(master: str, java: str | None) -> StartCache | None:
    """The cache for this Java and this Spark; None if it cannot be used here.

    Only for masters that do not send Spark's zipped modules to other machines. A Spark or a Python that the user chose
    is left as it is.
    """
    if os.environ.get(SWITCH) == "off" or "SPARK_HOME" in os.environ or java is None:
        return None
    if not re.fullmatch(r"local(\[.*\])?|spark://.*", master):  # a local-cluster writes into its Spark home
        return None
    if any(
        os.environ.get(name, sys.executable) != sys.executable for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON")
    ):
        return None
    spec = find_spec("pyspark")
    if spec is None or not spec.submodule_search_locations:
        return None
    installed = Path(spec.submodule_search_locations[0])
    try:
        directory = _base() / f"spark-{_key(installed, Path(java))}"
        cache = StartCache(directory)
        if any(mark in str(directory) for mark in "\"'\\\n*?"):  # the launcher's option syntax and Java's class path
            return None
        for folder in (directory.parent, directory):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_safe(folder.lstat(), stat.S_ISDIR):
                return None
        make_home(cache.home, installed)
    except OSError:
        return None
    return cache


@contextmanager
def variables_set(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables while a child process is started."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _base() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if os.path.isabs(cache) else Path.home() / ".cache") / "millstream"


def _key(installed: Path, java: Path) -> str:
    from millstream import __version__

    program = java.resolve()
    jars = installed / "jars"
    parts = [__version__, str(jars), *sorted(os.listdir(jars)), str(program)]
    # Whole seconds, because layers of container images keep no fractions.
    parts += [str(int(jars.stat().st_mtime)), str(int(program.stat().st_mtime)), str(program.stat().st_size)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def make_home(home: Path, installed: Path) -> None:
    """Make a Spark home of links to the installed Spark, without its zipped Python modules.

    A home that is incomplete, as after a cleanup or a copy without links, is replaced: Spark would not start from it.
    """
    links = {name: installed / name for name in _LINKED if (installed / name).exists()}
    if _is_home(home, links):
        return
    made = Path(tempfile.mkdtemp(prefix="home.", dir=home.parent))
    try:
        new, replaced = made / "new", made / "replaced"
        new.mkdir(mode=0o700)
        for name, target in links.items():
            (new / name).symlink_to(target)
        if os.path.lexists(home):
            home.rename(replaced)
        new.rename(home)
    except OSError:
        if not _is_home(home, links):  # otherwise another process made it
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _is_home(home: Path, links: Mapping[str, Path]) -> bool:
    try:
        return _is_safe(home.lstat(), stat.S_ISDIR) and all(
            os.readlink(home / name) == str(target) for name, target in links.items()
        )
    except OSError:
        return False


def _is_safe(status: os.stat_result, is_kind: Any) -> bool:
    """Whether only this user or root can have written it."""
    return is_kind(status.st_mode) and status.st_uid in (os.geteuid(), 0) and not status.st_mode & 0o022


def _identity(status: os.stat_result) -> dict[str, int]:
    return {"size": status.st_size, "mtime": int(status.st_mtime)}


def _train(variables: dict[str, str]) -> None:
    """Run pipelines that load what most pipelines load, in a Java process that writes the archive when it exits."""
    from millstream.broker import open_blocking_broker
    from millstream.pipelines.plan import make_plan
    from millstream.pipelines.runner import Runner
    from millstream.pipelines.session import start_session
    from millstream.server import Server

    with tempfile.TemporaryDirectory(prefix="millstream-") as scratch, open_blocking_broker("local://") as broker:
        server = Server.over(broker, port=0)
        server.start()
        try:
            url = f"redis://127.0.0.1:{server.port}"
            generator = {"type": "generator", "config": {"rows": 10}}
            entries = {"type": "redis", "config": {"uri": url, "stream": "made"}}
            plain = _training_pipeline("made", generator, scratch, url, [])
            copy = _training_pipeline("copied", entries, scratch, url, [])
            filtered = [{"type": "filter", "ops": ["c"]}]
            processed = _training_pipeline("processed", entries, scratch, url, filtered)
            os.environ.update(variables)
            plans = [make_plan(spec) for spec in (plain, copy, processed)]
            session = start_session(plans, "local[2]", log=Path(scratch, "log"))
            context: Any = session.sparkContext
            gateway, java = context._gateway, context._gateway.proc
            for pipeline in (plain, copy, processed):
                with Runner([pipeline], once=True, session=session) as runner:
                    if not runner.wait():
                        raise next(iter(runner.runs.values())).error or RuntimeError("a training pipeline failed")
            session.stop()
            gateway.shutdown()
            java.stdin.close()
            java.wait(_JAVA_EXIT_S)
        finally:
            server.stop()


def _training_pipeline(
    name: str, source: dict[str, Any], scratch: str, url: str, processors: list[dict[str, Any]]
) -> Any:
    from millstream.pipelines.spec.pipeline import Pipeline

    return Pipeline.model_validate(
        {
            "apiVersion": "millstream/v1",
            "kind": "Pipeline",
            "metadata": {"name": name},
            "spec": {
                "source": source,
                "processors": processors,
                "sinks": [{"type": "redis", "config": {"id": "out", "uri": url, "stream": name}}],
                "checkpoint": {"path": f"{scratch}/{name}"},
            },
        }
    )
