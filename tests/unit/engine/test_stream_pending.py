"""The pending list against a sorted dict, and its memory after any sequence of operations."""

from __future__ import annotations

import random

import pytest

from millstream.engine.stream.group import CHUNK_ENTRIES, Consumer, Group, PendingList


def check(pending: PendingList, model: dict[int, object], *starts: int) -> None:
    ordered = sorted(model.items())
    assert len(pending) == len(model)
    assert list(pending.items()) == ordered
    assert pending.first() == (ordered[0][0] if ordered else None)
    assert pending.last() == (ordered[-1][0] if ordered else None)
    for start in starts:
        expected = [item for item in ordered if item[0] >= start]
        assert list(pending.items(start)) == expected
        assert pending.page(start, 7) == expected[:7]


@pytest.mark.parametrize("seed", range(8))
def test_index_behaves_like_a_sorted_dict(seed: int) -> None:
    chance = random.Random(seed)
    alice, bob = Consumer(b"alice", 0), Consumer(b"bob", 0)
    pending, model = PendingList(), {}
    top = 0
    for step in range(400):
        draw = chance.random()
        info = (chance.choice([alice, bob]), step, chance.randrange(5))
        if draw < 0.35:
            top += chance.randrange(1, 5)
            ids = list(range(top, top + chance.choice([1, 3, 100, CHUNK_ENTRIES, CHUNK_ENTRIES + 5])))
            top = ids[-1]
            pending.add_all(ids, info)
            model.update(dict.fromkeys(ids, info))
        elif draw < 0.55:
            for _ in range(chance.choice([1, 50])):
                entry_id = chance.randrange(top + 10)
                pending.put(entry_id, info)
                model[entry_id] = info
        elif draw < 0.7:
            entry_id = chance.randrange(top + 10)
            assert pending.pop(entry_id) == model.pop(entry_id, None)
            assert pending.get(entry_id) is None
        elif model:
            batch = chance.sample(sorted(model), min(len(model), chance.choice([1, 100, 2000])))
            if chance.random() < 0.7:
                batch.sort()
            batch += batch[:2]
            result = pending.pop_all([*batch, top + 100])
            assert result == [model.pop(fromkey) for fromkey in dict.fromkeys(batch)]
        if step % 20 == 0:
            check(pending, model, 0, chance.randrange(top + 2), top + 50)
        for entry_id in chance.sample(sorted(model), min(len(model), 3)):
            assert pending.get(entry_id) == model[entry_id]
    check(pending, model, *sorted(model)[:3])


def test_shrunken_list_uses_little_memory() -> None:
    """One unacknowledged entry per chunk must not keep the memory of the whole chunk."""
    pending, info = PendingList(), (Consumer(b"c", 0), 0, 1)
    ids = list(range(50 * CHUNK_ENTRIES))
    pending.add_all(ids, info)
    pending.pop_all([entry_id for entry_id in ids if entry_id % CHUNK_ENTRIES])
    assert len(pending) == 50
    assert sum(chunk.__sizeof__() for chunk in pending._chunks) < 50 * 500
    assert [entry for entry, _ in pending.items()] == ids[::CHUNK_ENTRIES]


def test_chunks_stay_bounded_when_ids_arrive_backwards() -> None:
    pending, info = PendingList(), (Consumer(b"c", 0), 0, 1)
    for entry_id in range(20 * CHUNK_ENTRIES, 0, -1):
        pending.put(entry_id, info)
    assert max(map(len, pending._chunks)) <= 2 * CHUNK_ENTRIES
    assert [entry for entry, _ in pending.items(5)] == list(range(5, 20 * CHUNK_ENTRIES + 1))


def test_group_and_consumers_agree() -> None:
    chance = random.Random(1)
    group = Group(b"g", 0, 0)
    for name in (b"a", b"b"):
        group.consumers[name] = Consumer(name, 0)
    alice, bob = group.consumers.values()
    model: dict[int, tuple[Consumer, int, int]] = {}
    for now in range(300):
        consumer = chance.choice([alice, bob])
        start = chance.randrange(200)
        ids = list(range(start, start + chance.randrange(1, 30)))
        if chance.random() < 0.5:
            group.deliver(ids, consumer, now)
            model.update(dict.fromkeys(ids, (consumer, now, 1)))
        elif chance.random() < 0.5:
            assert group.release_all(ids) == sum(model.pop(item, None) is not None for item in ids)
        else:
            group.assign(ids[0], (consumer, now, 3))
            model[ids[0]] = (consumer, now, 3)
        assert list(group.pending.items()) == sorted(model.items())
        for item in (alice, bob):
            mine = {entry_id: held for entry_id, held in model.items() if held[0] is item}
            assert list(item.pending.items()) == sorted(mine.items())
    released = group.remove_consumer(alice)
    assert released == sum(held[0] is alice for held in model.values())
    assert list(group.pending.items()) == sorted((i, held) for i, held in model.items() if held[0] is bob)
