"""Every planted fault of the chaos tests finds the text that it changes and the tests that must notice it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from chaos.mutants import MUTANTS, SOURCE

ROOT = Path(__file__).parents[2]
WORD = re.compile(r"[\w-]+")
EXCLUDED = re.compile(r"\bnot +[\w-]+")
OPERATORS = {"and", "or", "not"}


def test_every_mutant_finds_its_text_in_the_sources(tmp_path: Path) -> None:
    """If this fails, code has moved: update the mutant in tests/chaos/mutants.py, with the same fault."""
    homeless = []
    for mutant in MUTANTS:
        copy = tmp_path / mutant.path
        copy.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copy(SOURCE / mutant.path, copy)
            mutant.plant(tmp_path)
        except (FileNotFoundError, LookupError) as error:
            homeless.append(f"{mutant.name}: {error}")
    assert not homeless, "\n".join(homeless)


def test_every_mutant_finds_the_tests_that_must_notice_it() -> None:
    """If this fails, a test was renamed or removed: update ``noticed_by`` in tests/chaos/mutants.py."""
    files = sorted({argument for mutant in MUTANTS for argument in mutant.noticed_by if argument.endswith(".py")})
    ids = collected(files)
    absent = {mutant.name: problem for mutant in MUTANTS if (problem := missing(mutant.noticed_by, ids))}
    assert not absent, "\n".join(f"{name}: {problem}" for name, problem in absent.items())


def collected(files: list[str]) -> list[str]:
    """The ids of all tests in the files, as pytest collects them."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return [line for line in done.stdout.splitlines() if "::" in line]


def missing(noticed_by: tuple[str, ...], ids: list[str]) -> str:
    """What pytest would not find when it is called with these arguments; empty if it finds everything."""
    files = [argument for argument in noticed_by if argument.endswith(".py")]
    candidates = [test for test in ids if test.partition("::")[0] in files]
    for file in files:
        if not any(test.startswith(f"{file}::") for test in candidates):
            return f"{file} has no tests"
    if "-k" not in noticed_by:
        return ""
    expression = noticed_by[noticed_by.index("-k") + 1]
    names = [test.partition("::")[2].lower() for test in candidates]
    for word in WORD.findall(EXCLUDED.sub("", expression)):
        if word not in OPERATORS and not any(word.lower() in name for name in names):
            return f"no test has {word!r} in its name"
    return "" if any(selects(expression, name) for name in names) else f"no test matches {expression!r}"


def selects(expression: str, name: str) -> bool:
    """Whether ``pytest -k`` selects the test: each word stands for "is part of the name"."""
    words = WORD.sub(lambda match: match[0] if match[0] in OPERATORS else str(match[0].lower() in name), expression)
    return bool(eval(words))
