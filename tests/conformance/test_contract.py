"""The guarantees of every broker: one suite over three kinds of brokers and two APIs."""

from __future__ import annotations

import inspect

from millstream import BlockingBroker, Broker
from millstream.testing import conformance
from millstream.testing.conformance.chapter import signatures


class TestWriting(conformance.WritingChapter):
    pass


class TestReading(conformance.ReadingChapter):
    pass


class TestGroups(conformance.GroupChapter):
    pass


class TestPending(conformance.PendingChapter):
    pass


class TestWaiting(conformance.WaitingChapter):
    pass


class TestAppendOnce(conformance.AppendOnceChapter):
    pass


class TestAppendUnique(conformance.AppendUniqueChapter):
    pass


class TestTrimming(conformance.TrimmingChapter):
    pass


class TestInfo(conformance.InfoChapter):
    pass


class TestKeys(conformance.KeyChapter):
    pass


class TestErrors(conformance.ErrorChapter):
    pass


class TestArguments(conformance.ArgumentChapter):
    pass


class TestDurability(conformance.DurabilityChapter):
    pass


def test_no_chapter_is_left_out() -> None:
    here = {cls.__mro__[1] for cls in globals().values() if inspect.isclass(cls) and cls.__name__.startswith("Test")}

    assert here == set(conformance.CHAPTERS)


def test_both_apis_have_the_same_operations() -> None:
    ours, theirs = signatures(Broker), signatures(BlockingBroker)

    assert ours.keys() == theirs.keys()
    for name, operation in ours.items():
        assert inspect.signature(operation) == inspect.signature(theirs[name]), name
