"""Arguments that had another name work for one release, and say so."""

from __future__ import annotations

from uuid import uuid4

import pytest

from millstream import open_blocking_broker, open_broker


async def test_epoch_is_version_now() -> None:
    async with open_broker(f"local://{uuid4().hex}") as broker:
        with pytest.warns(DeprecationWarning, match="epoch goes with the next release: it is version now"):
            await broker.append_once("s", "w", epoch=1, position=0, entries=[{"n": 1}])  # type: ignore[call-arg]
        with pytest.warns(DeprecationWarning, match="version"):
            writer = broker.once_writer("s", "w", epoch=2)  # type: ignore[call-arg]
        await writer.append([{"n": 2}])
        assert await broker.xlen("s") == 2
        await broker.append_once("s", "w", version=2, position=0, entries=[{"n": 2}])
        assert await broker.xlen("s") == 2


def test_for_threads_too() -> None:
    with open_blocking_broker(f"local://{uuid4().hex}") as broker:
        with pytest.warns(DeprecationWarning, match="version"):
            broker.append_once("s", "w", epoch=1, position=0, entries=[{"n": 1}])  # type: ignore[call-arg]
        assert broker.xlen("s") == 1
