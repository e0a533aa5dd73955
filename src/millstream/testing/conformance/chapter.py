"""What all chapters share: fresh names."""

from __future__ import annotations

from uuid import uuid4

import pytest


class Chapter:
    """Give it a fixture ``broker``."""

    @pytest.fixture
    def stream(self) -> str:
        """A stream that nobody has used."""
        return f"conformance:{uuid4().hex[:12]}"
