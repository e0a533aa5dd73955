"""Each lost entry is counted once, whoever finds it gone: the driver, a task, or both."""

from millstream.spark.data_loss import Gap, Loss, LossAccount, new_book


def gap(lost: int | None, text: str = "gone") -> Gap:
    return Gap(lost, True, text)


def test_what_only_tasks_found_is_counted():
    account = LossAccount()
    account.planning()
    assert account.by_tasks({"s": 15, "t": None}) == {"s": 15, "t": None}
    assert account.totals == {"s": Loss(15, 1), "t": Loss(0, 1)}


def test_what_driver_and_tasks_found_is_counted_once():
    account = LossAccount()
    account.planning()
    assert account.by_driver("s", gap(10))
    assert account.by_tasks({"s": 10}) == {}
    assert account.totals == {"s": Loss(10, 1)}


def test_what_went_after_the_driver_had_looked_is_added():
    account = LossAccount()
    account.by_driver("s", gap(10))
    assert account.by_tasks({"s": 14}) == {"s": 4}
    assert account.totals == {"s": Loss(14, 1)}


def test_a_gap_of_unknown_size_that_both_found_is_one_gap():
    account = LossAccount()
    account.by_driver("s", gap(None))
    assert account.by_tasks({"s": None}) == {}
    assert account.totals == {"s": Loss(0, 1)}


def test_the_next_batchs_losses_are_new_and_a_poll_that_meets_the_same_gap_is_not():
    account = LossAccount()
    account.by_driver("s", gap(10, "ten"))
    account.planning()
    assert not account.by_driver("s", gap(10, "ten"))
    account.planning()
    assert account.by_tasks({"s": 3}) == {"s": 3}
    assert account.totals == {"s": Loss(13, 2)}


def test_an_idle_query_that_meets_one_gap_for_hours_remembers_it_once():
    account = LossAccount()
    assert [account.by_driver("s", gap(None)) for _ in range(3)] == [True, False, False]
    assert account.totals == {"s": Loss(0, 1)}


def test_a_book_lies_beside_the_first_stream_that_can_have_companions():
    book = new_book(["odd}name", "orders"])
    assert book is not None
    assert book.startswith(b"{orders}.gaps:")
    assert new_book(["odd}name"]) is None
