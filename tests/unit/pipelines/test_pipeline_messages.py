"""Messages of pipelines: descriptions instead of patterns, progress of the start, and the summary."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from millstream.pipelines import SpecRefused, json_schema, parse_pipeline
from millstream.pipelines.plan import make_plan
from millstream.pipelines.session import check_before, check_parts, first_error
from millstream.pipelines.spec.part import IN_WORDS
from millstream.pipelines.status import Tally
from millstream.testing import free_port

SPEC = """
apiVersion: millstream/v1
kind: Pipeline
metadata: {{name: {name}}}
spec:
  source: {{type: generator, config: {{rows: 10}}}}
  processors: [{processors}]
  retry: {{deadline: 90s}}
  checkpoint: {{path: "{path}"}}
  sinks:
    - {{type: redis, config: {{id: out, uri: "redis://127.0.0.1:{port}", stream: out, maxlen: {maxlen}}}}}
"""


def spec(path: Path, *, name: str = "shop", processors: str = "", maxlen: str = "10", port: int = 1) -> str:
    return SPEC.format(name=name, processors=processors, maxlen=maxlen, port=port, path=path / "checkpoint")


def refused(text: str) -> str:
    with pytest.raises(SpecRefused) as result:
        parse_pipeline(text)
    return str(result.value)


def test_error_of_a_pattern_describes_it(tmp_path: Path) -> None:
    assert "write a number, or ~ and a number (not 'many')" in refused(spec(tmp_path, maxlen="many"))
    assert "write 1 to 63 letters, digits, dots" in refused(spec(tmp_path, name="-"))
    reported = refused(spec(tmp_path, processors="{type: python, function: shop.rules}"))
    assert "write package.module:function" in reported
    assert "^[" not in reported


def test_every_pattern_of_the_spec_has_a_description() -> None:
    def patterns(schema: object) -> set[str]:
        if isinstance(schema, dict):
            own = {schema["pattern"]} if isinstance(schema.get("pattern"), str) else set()
            return own.union(*map(patterns, schema.values()))
        return set().union(*map(patterns, schema)) if isinstance(schema, list) else set()

    durations_and_sizes = {pattern for pattern in patterns(json_schema()) if "ms" in pattern or "[bB]" in pattern}
    assert patterns(json_schema()) - durations_and_sizes <= IN_WORDS.keys()


def test_error_of_an_unknown_field_lists_the_allowed_ones(tmp_path: Path) -> None:
    reported = refused(spec(tmp_path).replace("{rows: 10}", "{rowz: 10}"))
    assert "did you mean rows?" in reported
    reported = refused(spec(tmp_path, processors="{type: mask, fields: {email: {hush: 1}}}"))
    assert not reported.rstrip().endswith("allowed here:")
    assert "allowed here: \n" not in reported


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("nowhere.at_all:f", "nowhere.at_all cannot be imported: nowhere, which it imports, is not found"),
        ("broken_rules:f", "broken_rules cannot be imported: NameError: name 'oops' is not defined"),
        ("json:lods", "json has no function lods"),
    ],
)
def test_a_function_that_does_not_import_is_found_before_anything_starts(
    function: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_rules.py").write_text("oops\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    made = make_plan(parse_pipeline(spec(tmp_path, processors=f"{{type: python, function: '{function}'}}")))
    with pytest.raises(SpecRefused, match=says):
        check_parts([made])


def test_unreachable_required_sink_is_reported_before_spark_starts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = make_plan(parse_pipeline(spec(tmp_path, port=free_port())))
    with caplog.at_level(logging.WARNING):
        check_before([made], once=True, master="local[1]")
    assert "shop: sink out at redis://127.0.0.1" in caplog.text
    assert "does not answer" in caplog.text
    assert "It is retried for 90 s, then the pipeline fails" in caplog.text


def test_tally_counts_rows_in_and_out_for_each_sink() -> None:
    tally = Tally()
    for batch in range(2):
        tally("pipeline.sink", pipeline="p", sink="a", batch=batch, rows=10, bytes=1, dropped=0, s=0.1)
        tally("pipeline.sink", pipeline="p", sink="b", batch=batch, rows=None, bytes=1, dropped=0, s=0.1)
        tally("pipeline.batch", pipeline="p", batch=batch, events=11, failed=1, s=0.2)
    tally("pipeline.dead_letters", pipeline="p", batch=1, events=2, entries=2, saturation=0.1)
    first, *remaining = tally.lines("p", ["a", "b"], "acme:p.dlq")
    assert first.startswith("22 rows in, ")
    assert first.endswith(" rows/s")
    assert remaining == [
        "sink a: 20 rows out",
        "sink b: 0 rows out",
        "dead letters: 2; see why: millstream dlq ls acme:p.dlq",
    ]


UNRESPONSIVE = """\
Using Spark's default log4j profile: org/apache/spark/log4j2-defaults.properties
26/11/16 17:35:44 WARN NativeCodeLoader: Unable to load native-hadoop library for your platform... using builtin-java
26/11/16 17:35:47 WARN StandaloneAppClient$ClientEndpoint: Failed to connect to master spark.internal:7077
org.apache.spark.SparkException: Exception thrown in awaitResult:
\tat org.apache.spark.util.SparkThreadUtils$.awaitResult(SparkThreadUtils.scala:53)
Caused by: java.io.IOException: Failed to connect to spark.internal/10.0.0.7:7077
\tat org.apache.spark.network.client.TransportClientFactory.createClient(TransportClientFactory.java:287)
\t... 4 more
Caused by: java.net.ConnectException: Connection refused (111)
\tat io.netty.channel.unix.Errors.newConnectException0(Errors.java:166)
26/11/16 17:36:07 WARN StandaloneAppClient$ClientEndpoint: Failed to connect to master spark.internal:7077
org.apache.spark.SparkException: Exception thrown in awaitResult:
Caused by: java.io.IOException: something else
26/11/16 17:36:47 ERROR StandaloneSchedulerBackend: Application has been killed. Reason: All masters are unresponsive!
26/11/16 17:36:50 WARN StandaloneAppClient$ClientEndpoint: Drop UnregisterApplication(null)
"""


@pytest.mark.parametrize(
    ("output", "reported"),
    [
        (UNRESPONSIVE, "Failed to connect to master spark.internal:7077: Connection refused (111)"),
        ("26/11/16 17:36:47 ERROR SparkContext: No room on the disk.\n" * 2, "No room on the disk."),
        ("26/11/16 17:36:47 WARN Utils: Your hostname resolves to a loopback address\n", None),
        ("", None),
    ],
)
def test_first_error_of_a_failed_spark_start_is_reported(output: str, reported: str | None) -> None:
    assert first_error(output) == reported
