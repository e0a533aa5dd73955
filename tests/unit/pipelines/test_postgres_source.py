"""A PostgreSQL source in a spec: which options it accepts, which it passes to Spark, and which it never passes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from millstream.pipelines import SpecRefused, parse_pipeline
from millstream.pipelines.plan import describe, make_plan
from millstream.pipelines.redis_address import SecretFiles
from millstream.pipelines.sources import Opening
from millstream.pipelines.sources.databases import MariadbSource, PostgresSource

SPEC = """\
apiVersion: millstream/v1
kind: Pipeline
metadata: {name: My.Shop}
spec:
  source: {type: postgres, config: {CONFIG}}
  sinks: [{type: redis, config: {id: out, uri: "redis://127.0.0.1:1", stream: s}}]
"""
GOOD = 'dsn: "postgresql://me@127.0.0.1:1/shop", tables: [orders, "billing.*"]'


def source(config: str = GOOD) -> PostgresSource:
    result = parse_pipeline(SPEC.replace("CONFIG", config)).spec.source
    assert isinstance(result, PostgresSource)
    return result


def options(made: PostgresSource, **opening: Any) -> dict[str, str]:
    return made._options(Opening("My.Shop", "t", 500, checkpoint="/checkpoint", **opening))


def test_names_come_from_the_pipeline_and_segments_are_under_its_checkpoint() -> None:
    reported = options(source())
    slot = source().slot("My.Shop")
    assert (reported["slot"], reported["publication"], reported["sourceName"]) == (slot, slot, "My.Shop")
    assert reported["segments"] == "/checkpoint/segments"
    assert (reported["tables"], reported["create"], reported["snapshot"], reported["partitions"]) == (
        "orders,billing.*",
        "false",
        "initial",
        "1",
    )
    assert (reported["maxChangesPerTrigger"], reported["chunkRows"]) == ("500", "500")


def test_pipelines_with_different_names_have_different_slots() -> None:
    assert source().slot("my_shop") == "millstream_my_shop"
    names = ["my_shop", "my-shop", "my.shop", "My_Shop", "x" * 50, "x" * 50 + "1", "x" * 50 + "2"]
    slots = [source().slot(name) for name in names]
    assert len(set(slots)) == len(names)
    assert all(re.fullmatch("[a-z0-9_]{1,63}", slot) for slot in slots)


@pytest.mark.parametrize(
    ("events", "at_once", "wanted", "chunk", "chunks"),
    [
        (100_000, 2, 100_000, 50_000, 2),  # the defaults: one chunk a batch would leave the second core without work
        (500_000, 2, 100_000, 83_333, 6),  # five of them would leave it idle for the last
        (500_000, 8, 100_000, 62_500, 8),
        (100_000, 64, 100_000, 10_000, 10),  # none so small that a connection costs more than its rows
        (100_000, 2, 1_000, 1_000, 100),
        (500, 2, 100_000, 500, 1),
        (3, 2, 2, 2, 1),
    ],
)
def test_a_batch_of_a_snapshot_keeps_every_core_busy_to_its_end(
    events: int, at_once: int, wanted: int, chunk: int, chunks: int
) -> None:
    made = source(f"{GOOD}, chunk_rows: {wanted}")
    reported = made._options(Opening("p", "t", events, partitions=at_once))
    assert int(reported["chunkRows"]) == chunk
    assert events // chunk == chunks


@pytest.mark.parametrize(
    ("dsn", "tables", "plain"),
    [
        ("postgresql://me@127.0.0.1:1/shop", "[orders, shop.lines]", {"db", "schema", "table"}),
        ("postgresql://me@127.0.0.1:1/shop", "[orders, 'billing.*']", {"db"}),  # a glob takes any name, quotes and all
        ("postgresql://me@127.0.0.1:1/shop", "['order?']", {"db"}),
        ("postgresql://me@127.0.0.1:1/shop", "['a\"b']", {"db"}),
        ("postgresql://me@127.0.0.1:1/${NAME}", "[orders]", {"schema", "table"}),
        ("host=127.0.0.1 dbname='a\"b'", "[orders]", {"schema", "table"}),
    ],
)
def test_names_that_are_written_out_are_known_to_need_no_escaping(dsn: str, tables: str, plain: set[str]) -> None:
    made = source(f'dsn: "postgresql://h/x", tables: {tables}')
    made.config.__dict__["dsn"] = dsn  # as it is: a spec's variables are replaced when the file is read
    assert made.plain() - {"id", "name", "op"} == plain


@pytest.mark.parametrize(
    ("database", "tables", "plain"),
    [
        ("shop", "[orders, other.lines]", {"db", "table"}),
        ("shop", "[orders, 'other.*']", set()),
        ("a%22b", "[orders]", set()),  # the schema of a table that names none
    ],
)
def test_a_database_of_mariadb_is_a_schema_and_plain_with_its_tables(
    database: str, tables: str, plain: set[str]
) -> None:
    config = f'dsn: "mariadb://me@127.0.0.1:1/{database}", tables: {tables}'
    made = parse_pipeline(SPEC.replace("type: postgres", "type: mariadb").replace("CONFIG", config)).spec.source
    assert isinstance(made, MariadbSource)
    assert made.plain() - {"id", "name", "op"} == plain


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://me:s3cret@127.0.0.1:1/shop",
        "host=127.0.0.1 port=1 dbname=shop password=s3cret",
        "postgresql://127.0.0.1:1/shop?password=s3cret",
    ],
)
def test_a_password_is_in_a_file_and_in_nothing_else(dsn: str) -> None:
    made, secrets = source(f'dsn: "{dsn}", tables: [t]'), SecretFiles()
    arguments = options(made, secrets=secrets)
    assert "dsn" not in arguments
    assert Path(arguments["dsnFile"]).read_text() == dsn
    assert Path(arguments["dsnFile"]).stat().st_mode & 0o777 == 0o600
    assert list(made.secrets()) == [dsn]
    displayed = f"{arguments} {made!r} {made.identity()} {made.login()!r}"
    assert "s3cret" not in displayed
    secrets.close()


def test_password_on_a_cluster_needs_a_file_that_all_hosts_have() -> None:
    made = source('dsn: "postgresql://me:s3cret@127.0.0.1:1/shop", tables: [t]')
    problems = list(made.problems_before_start("p", begun=False, master="spark://host:7077"))
    assert not any("segments" in problem for problem in problems)
    assert any("password_file" in problem for problem in problems)
    assert "s3cret" not in "".join(problems)
    assert list(source().problems_before_start("p", begun=False, master="local[2]")) == [], "a server may yet come"


def test_tasks_read_segments_only_on_the_drivers_host() -> None:
    def shared(**opening: Any) -> str:
        return source()._options(Opening("p", "t", 500, **opening))["segmentsShared"]

    assert shared() == "true"
    assert shared(tasks_are_local=False) == "false"
    assert shared(checkpoint="hdfs://h:1/d", gateway_file="/private/file") == "false"


def test_plan_says_which_order_is_kept() -> None:
    def order(config: str) -> str:
        return dict(describe(make_plan(parse_pipeline(SPEC.replace("CONFIG", config)))))["order"]

    assert "that of commits" in order(GOOD)
    assert "each key" in order(GOOD + ", partitions: 4")


def test_error_does_not_quote_a_wrong_dsn() -> None:
    with pytest.raises(SpecRefused) as caught:
        source('dsn: "hots=h pasword=s3cret", tables: [t]')
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "where"),
    [
        ("tables: [t]", "dsn"),
        ('dsn: "mysql://h/d", tables: [t]', "dsn"),
        ('dsn: "postgresql://h/d"', "tables"),
        ('dsn: "postgresql://h/d", tables: []', "tables"),
        (GOOD + ", slot: Capital", "slot"),
        (GOOD + ", snapshot: sometimes", "snapshot"),
        (GOOD + ", partitions: 0", "partitions"),
        (GOOD + ", segments: 'hdfs://host/dir'", "segments"),
        (GOOD + ', numeric: "decimal(40)"', "numeric"),
        (GOOD + ", exclude: [note]", "exclude"),
        (GOOD + ", max_bytes: 10", "max_bytes"),
        (GOOD + ", typo: 1", "typo"),
    ],
)
def test_wrong_option_is_refused_with_its_path(config: str, where: str) -> None:
    with pytest.raises(SpecRefused, match=where):
        source(config)
