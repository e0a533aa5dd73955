"""The contract of every storage. Subclasses define the fixture ``storage``: an empty directory."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from millstream.storage import ObjectMissing, Storage


class StorageContract:
    def test_reads_what_was_written(self, storage: Storage) -> None:
        storage.write("a/b.json", b"one")
        assert storage.read("a/b.json") == b"one"

    def test_write_joins_its_parts(self, storage: Storage) -> None:
        storage.write("parts", b"ab", bytearray(b"cd"), memoryview(b"ef"))
        assert storage.read("parts") == b"abcdef"

    def test_write_replaces(self, storage: Storage) -> None:
        storage.write("record", b"a longer first version")
        storage.write("record", b"second")
        assert storage.read("record") == b"second"

    def test_reads_a_range(self, storage: Storage) -> None:
        storage.write("range", b"0123456789")
        assert storage.read("range", 3, 4) == b"3456"
        assert storage.read("range", 8) == b"89"
        assert storage.read("range", 8, 10) == b"89"
        assert storage.read("range", 10, 5) == b""

    def test_reads_a_large_range(self, storage: Storage) -> None:
        content = bytes(range(256)) * 8_000
        storage.write("large", content)
        assert storage.read("large", 1000, 600_000) == content[1000:601_000]
        assert storage.read("large", 1000) == content[1000:]

    def test_fetch_copies_to_a_private_file(self, storage: Storage, tmp_path: Path) -> None:
        for name, content in (("empty", b""), ("small", b"1"), ("large", bytes(range(256)) * 8_000)):
            storage.write(name, content)
            storage.fetch(name, tmp_path / name)
            assert (tmp_path / name).read_bytes() == content
            assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
        with pytest.raises(ObjectMissing):
            storage.fetch("missing", tmp_path / "missing")

    def test_empty_object_is_kept(self, storage: Storage) -> None:
        storage.write("empty")
        assert storage.read("empty") == b""
        assert storage.exists("empty")

    def test_all_bytes_survive(self, storage: Storage) -> None:
        content = bytes(range(256)) * 20_000  # 5 MB: several calls
        storage.write("large", content)
        assert storage.read("large") == content
        assert storage.size("large") == len(content)

    def test_missing_object_cannot_be_read(self, storage: Storage) -> None:
        with pytest.raises(ObjectMissing) as raised:
            storage.read("missing")
        assert raised.value.location == storage.uri("missing")

    def test_create_keeps_the_first_object(self, storage: Storage) -> None:
        assert storage.create("once", b"first")
        assert not storage.create("once", b"second")
        assert storage.read("once") == b"first"
        assert [entry.name for entry in storage.list()] == ["once"]

    def test_one_of_concurrent_creators_wins(self, storage: Storage) -> None:
        start, won = threading.Barrier(4), []

        def create(writer: int) -> None:
            start.wait()
            if storage.create("raced", b"%d" % writer):
                won.append(writer)

        threads = [threading.Thread(target=create, args=(writer,)) for writer in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert storage.read("raced") == b"%d" % won[0]
        assert [entry.name for entry in storage.list()] == ["raced"]

    def test_reader_never_sees_a_partial_object(self, storage: Storage) -> None:
        versions = [bytes([number]) * (100_000 * (number + 1)) for number in range(6)]
        storage.write("shared", versions[0])
        done = threading.Event()
        received = []

        def read() -> None:
            while not done.is_set():
                received.append(storage.read("shared"))

        reader = threading.Thread(target=read)
        reader.start()
        for version in versions:
            storage.write("shared", version)
        done.set()
        reader.join()
        assert set(received) <= set(versions)

    def test_list_names_files_and_directories(self, storage: Storage) -> None:
        storage.write("d/2", b"22")
        storage.write("d/1", b"1")
        storage.write("d/sub/x", b"x")
        assert [(e.name, e.size, e.is_directory) for e in storage.list("d")] == [
            ("1", 1, False),
            ("2", 2, False),
            ("sub", 0, True),
        ]
        assert storage.list("missing") == []
        assert [e.name for e in storage.list()] == ["d"]

    def test_delete_removes_objects_and_directories(self, storage: Storage) -> None:
        storage.write("d/sub/x", b"x")
        storage.write("d/y", b"y")
        storage.delete("d/y")
        assert not storage.exists("d/y")
        storage.delete("d")
        assert not storage.exists("d/sub/x")
        storage.delete("d")

    def test_size_of_a_directory_is_the_sum_of_its_files(self, storage: Storage) -> None:
        storage.write("d/sub/x", b"xxx")
        storage.write("d/y", b"yy")
        assert storage.size("d") == 5
        assert storage.size("missing") == 0

    def test_directory_is_a_storage_of_its_own(self, storage: Storage) -> None:
        inner = storage.directory("a/b")
        inner.make()
        inner.write("c", b"c")
        assert inner.uri("c") == storage.uri("a/b/c")
        assert storage.read("a/b/c") == b"c"

    def test_stat_tells_when_an_object_was_written(self, storage: Storage) -> None:
        storage.write("first", b"1")
        storage.write("second", b"2")
        first, second = storage.stat("first"), storage.stat("second")
        assert first is not None
        assert second is not None
        assert 0 < first.modified_ms <= second.modified_ms
        assert storage.stat("third") is None
