"""Every planted fault of the chaos tests still finds the text that it changes: none is forgotten when code moves."""

from __future__ import annotations

import shutil
from pathlib import Path

from chaos.mutants import MUTANTS, SOURCE


def test_every_mutant_finds_its_text_in_the_sources(tmp_path: Path) -> None:
    """Where this fails, code has moved: bring the mutant in tests/chaos/mutants.py along, with the same fault."""
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
