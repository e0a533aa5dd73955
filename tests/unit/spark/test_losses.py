"""Each lost entry is counted once, whether the driver, a task or both detect the loss."""

from millstream.spark.data_loss import Gap, Loss, LossAccount, new_gap_key


def gap(lost: int | None, text: str = "gone") -> Gap:
    return Gap(lost, True, text)


def test_gaps_recorded_by_tasks_are_counted():
    account = LossAccount()
    account.start_planning()
    assert account.add_task_gaps({"s": 15, "t": None}) == {"s": 15, "t": None}
    assert account.totals == {"s": Loss(15, 1), "t": Loss(0, 1)}


def test_gap_detected_by_driver_and_tasks_is_counted_once():
    account = LossAccount()
    account.start_planning()
    assert account.add_driver_gap("s", gap(10))
    assert account.add_task_gaps({"s": 10}) == {}
    assert account.totals == {"s": Loss(10, 1)}


def test_entries_lost_after_planning_are_added():
    account = LossAccount()
    account.add_driver_gap("s", gap(10))
    assert account.add_task_gaps({"s": 14}) == {"s": 4}
    assert account.totals == {"s": Loss(14, 1)}


def test_gap_of_unknown_size_detected_by_both_is_counted_once():
    account = LossAccount()
    account.add_driver_gap("s", gap(None))
    assert account.add_task_gaps({"s": None}) == {}
    assert account.totals == {"s": Loss(0, 1)}


def test_repeated_poll_does_not_count_a_gap_again():
    account = LossAccount()
    account.add_driver_gap("s", gap(10, "ten"))
    account.start_planning()
    assert not account.add_driver_gap("s", gap(10, "ten"))
    account.start_planning()
    assert account.add_task_gaps({"s": 3}) == {"s": 3}
    assert account.totals == {"s": Loss(13, 2)}


def test_idle_query_stores_a_repeated_gap_once():
    account = LossAccount()
    assert [account.add_driver_gap("s", gap(None)) for _ in range(3)] == [True, False, False]
    assert account.totals == {"s": Loss(0, 1)}


def test_gap_key_is_a_companion_of_the_first_stream_that_allows_one():
    gap_key = new_gap_key(["odd}name", "orders"])
    assert gap_key is not None
    assert gap_key.startswith(b"{orders}.gaps:")
    assert new_gap_key(["odd}name"]) is None
