"""The deployment files: they parse, and every command, option, variable and path in them exists.

Helm renders the chart where it is installed; elsewhere those tests are skipped, and the options in its templates are
still compared with the commands.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from millstream.pipelines import load_pipeline

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "millstream"
sys.path.insert(0, str(ROOT / "scripts"))

from make_reference import commands  # noqa: E402  # it stands beside the product, not in it

COMMANDS = dict(commands())


def variables() -> Iterator[str]:
    """Environment variables that commands read."""
    yield from ("MILLSTREAM_URL", "MILLSTREAM_HTTP_TOKEN")
    for command in COMMANDS.values():
        for parameter in command.params:
            yield from [parameter.envvar] if isinstance(parameter.envvar, str) else parameter.envvar or ()


VARIABLES = set(variables())
needs_helm = pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not installed")


def check_command(words: list[str]) -> None:
    """Raises AssertionError where ``millstream`` has no such command, or the command no such option."""
    name = next((name for count in (2, 1) if (name := " ".join(words[:count])) in COMMANDS), None)
    assert name is not None, f"millstream has no command {words[:2]}"
    options = {
        text: parameter for parameter in COMMANDS[name].params for text in (*parameter.opts, *parameter.secondary_opts)
    }
    remaining = iter(words[len(name.split()) :])
    for word in remaining:
        if word.startswith("-"):
            assert word in options, f"millstream {name} has no option {word}"
            if not getattr(options[word], "is_flag", False):
                value = next(remaining, None)
                assert value is not None, f"{word} lacks its value"
                assert not value.startswith("--"), f"{word} lacks its value"


def compose() -> dict[str, Any]:
    loaded = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert isinstance(loaded, dict)
    return loaded


def instructions(stage: str) -> list[tuple[str, str]]:
    """The instructions of one stage of the Dockerfile, with continued lines joined."""
    text = re.sub(r"\\\n\s*", " ", (DEPLOY / "Dockerfile").read_text())
    lines = [line.partition(" ")[::2] for line in text.splitlines() if line and not line.startswith("#")]
    first = next(
        at for at, (word, arguments) in enumerate(lines) if word == "FROM" and arguments.endswith(f" AS {stage}")
    )
    after = [at for at, (word, _) in enumerate(lines) if word == "FROM" and at > first]
    return [(word, arguments.strip()) for word, arguments in lines[first : after[0] if after else None]]


@pytest.mark.parametrize("stage", ["worker", "pipeline"])
def test_image_runs_millstream_unprivileged_without_a_shell_and_checks_health(stage: str) -> None:
    result = dict(instructions(stage))
    assert json.loads(result["ENTRYPOINT"]) == ["millstream"]
    assert json.loads(result["CMD"]) == ["--help"]
    assert result["USER"] == "10001:10001"
    check = json.loads(result["HEALTHCHECK"].partition("CMD ")[2])
    compile(check[2], "healthcheck", "exec")
    assert "HEALTH_URL=http://127.0.0.1:" in result["ENV"]


def test_images_copy_only_what_the_repository_has() -> None:
    for stage in ("source", "worker", "pipeline"):
        for word, arguments in instructions(stage):
            if word == "COPY" and "--from" not in arguments:
                assert not [name for name in arguments.split()[:-1] if not (ROOT / name).exists()]
    allowed = [line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] == "!"]
    copied = [arguments for word, arguments in instructions("source") if word == "COPY"]
    assert sorted(allowed) == sorted(name for arguments in copied for name in arguments.split()[:-1])


@pytest.mark.parametrize("service", ["worker", "dashboard", "pipeline"])
def test_compose_services_are_hardened_and_run_commands_that_exist(service: str) -> None:
    result = compose()["services"][service]
    check_command(result["command"])
    assert result["read_only"] is True
    assert result["cap_drop"] == ["ALL"]
    assert "MILLSTREAM_HTTP_TOKEN" in result["environment"], "off loopback a token is required"
    for volume in result.get("volumes", ()):
        source = volume.split(":")[0]
        assert (DEPLOY / source).exists() if source.startswith(".") else source in compose()["volumes"]
    for port in result["ports"]:
        assert port.startswith("127.0.0.1:")


def test_recreated_compose_pipeline_waits_for_the_lease_of_its_predecessor() -> None:
    """A recreated container has another host name, so a killed predecessor looks like a process on another machine."""
    assert "--standby" in compose()["services"]["pipeline"]["command"]


def test_compose_stops_later_than_the_worker_drains() -> None:
    worker = compose()["services"]["worker"]
    drain_s = int(worker["command"][worker["command"].index("--drain") + 1].removesuffix("s"))
    assert int(worker["stop_grace_period"].removesuffix("s")) > drain_s + 5


def unit() -> dict[str, list[str]]:
    result: dict[str, list[str]] = {}
    for line in (DEPLOY / "systemd" / "millstream@.service").read_text().splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            result.setdefault(name, []).append(value)
    return result


def test_systemd_unit_runs_a_command_that_exists_and_waits_for_its_drain() -> None:
    [line] = unit()["ExecStart"]
    program, *words = shlex.split(line)
    assert program.endswith("/bin/millstream")
    check_command(words)
    drain_s = int(words[words.index("--drain") + 1].removesuffix("s"))
    assert int(unit()["TimeoutStopSec"][0]) > drain_s + 5
    assert unit()["Type"] == ["notify"]
    assert unit()["KillMode"] == ["mixed"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "systemd" / "millstream@.service").read_text()
    path = tmp_path / "millstream@.service"
    path.write_text(text.replace("/opt/millstream/bin/millstream", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    complaints = [line for line in done.stderr.splitlines() if "millstream@" in line]
    assert complaints == []


def all_files() -> Iterator[Path]:
    yield from (path for path in sorted(DEPLOY.rglob("*")) if path.is_file() and path.suffix != ".pyc")


@pytest.mark.parametrize("path", list(all_files()), ids=lambda path: str(path.relative_to(DEPLOY)))
def test_file_names_only_variables_that_are_read_and_no_host_of_a_registry(path: Path) -> None:
    text = path.read_text()
    used = set(re.findall(r"\bMILLSTREAM_[A-Z_]+", text))
    assert used <= VARIABLES
    images = re.findall(r"^\s*(?:image:|FROM) +(\S+)", text, re.M)
    assert not [image for image in images if "." in image.split("/")[0] and "/" in image and "{{" not in image]


def test_example_pipeline_is_valid() -> None:
    load_pipeline(DEPLOY / "pipelines" / "orders.yaml")


# --- Helm -----------------------------------------------------------------------------------------------------------


def test_chart_templates_name_only_options_that_exist() -> None:
    known = {text for command in COMMANDS.values() for parameter in command.params for text in parameter.opts}
    for path in (CHART / "templates").glob("*.yaml"):
        assert not set(re.findall(r"^\s+- (--[a-z-]+)", path.read_text(), re.M)) - known


def test_chart_has_the_version_of_the_package() -> None:
    from millstream import __version__

    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)


EVERYTHING = (
    "serviceMonitor.enabled=true,scaledObject.enabled=true,scaledObject.passwordKey=password,pipeline.enabled=true,"
    "dashboard.names={dashboard.example}"
)
FILES = f"pipeline.files.orders\\.yaml={DEPLOY / 'pipelines' / 'orders.yaml'}"


def helm(*words: str) -> str:
    done = subprocess.run(["helm", *words], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rendered(*words: str) -> list[dict[str, Any]]:
    return [item for item in yaml.safe_load_all(helm("template", "shop", str(CHART), *words)) if item]


def everything() -> list[dict[str, Any]]:
    return rendered("--set", EVERYTHING, "--set-file", FILES)


@needs_helm
def test_chart_passes_helm_lint() -> None:
    helm("lint", "--strict", str(CHART))


@needs_helm
def test_chart_renders_commands_that_exist_and_hardened_pods() -> None:
    pods = [item for item in everything() if item["kind"] in ("Deployment", "StatefulSet")]
    assert len(pods) == 3
    for pod in pods:
        spec = pod["spec"]["template"]["spec"]
        [container] = spec["containers"]
        check_command(container["args"])
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        names = {item["name"] for item in container["env"]}
        assert names >= {"MILLSTREAM_HTTP_TOKEN"}
        ports = {item["name"] for item in container["ports"]}
        assert container["livenessProbe"]["httpGet"]["port"] in ports
        if "--drain" in container["args"]:
            drain_s = int(container["args"][container["args"].index("--drain") + 1].removesuffix("s"))
            assert spec["terminationGracePeriodSeconds"] > drain_s + 5


@needs_helm
def test_chart_renders_every_optional_object_only_when_it_is_enabled() -> None:
    optional = {"ServiceMonitor", "ScaledObject", "TriggerAuthentication", "StatefulSet"}
    kinds = {item["kind"] for item in everything()}
    assert kinds >= {"Deployment", "Service", "PodDisruptionBudget", "ConfigMap", *optional}
    assert not {item["kind"] for item in rendered()} & optional


@needs_helm
def test_selectors_of_the_chart_match_the_pods_they_mean() -> None:
    objects = everything()
    pods = [
        manifest["spec"]["template"]["metadata"]["labels"]
        for manifest in objects
        if "template" in manifest.get("spec", {})
    ]
    for object in objects:
        if object["kind"] in ("Service", "PodDisruptionBudget"):
            selector = object["spec"]["selector"].get("matchLabels", object["spec"]["selector"])
            assert len([labels for labels in pods if selector.items() <= labels.items()]) == 1
    [scaled] = [manifest for manifest in objects if manifest["kind"] == "ScaledObject"]
    [worker] = [
        manifest
        for manifest in objects
        if manifest["kind"] == "Deployment" and "worker" in manifest["metadata"]["name"]
    ]
    assert scaled["spec"]["scaleTargetRef"]["name"] == worker["metadata"]["name"]
    assert "replicas" not in worker["spec"], "KEDA decides"


def pipeline_pod(*settings: str) -> dict[str, Any]:
    values = ",".join(("pipeline.enabled=true", *settings))
    objects = rendered("--set", values, "--set-file", FILES)
    [stateful] = [one for one in objects if one["kind"] == "StatefulSet"]
    spec = stateful["spec"]
    assert isinstance(spec, dict)
    return spec


@needs_helm
def test_pipeline_that_replaces_one_on_a_lost_node_waits_for_its_lease() -> None:
    spec = pipeline_pod()
    [container] = spec["template"]["spec"]["containers"]
    assert "--standby" in container["args"]
    assert spec["replicas"] == 1
    assert "readinessProbe" in container


@needs_helm
def test_standby_pods_have_no_volumes_and_need_not_be_ready() -> None:
    spec = pipeline_pod("pipeline.replicas=2", "pipeline.storage.enabled=false")
    assert spec["replicas"] == 2
    assert spec["podManagementPolicy"] == "Parallel"
    assert "volumeClaimTemplates" not in spec
    pod = spec["template"]["spec"]
    assert {"name": "state", "emptyDir": {}} in pod["volumes"]
    assert "readinessProbe" not in pod["containers"][0], "a rollout waits until a pod is ready"


@needs_helm
def test_large_numbers_of_a_values_file_stay_whole_numbers(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text("scaledObject: {enabled: true, lagCount: 2000000}\nworker: {drainSeconds: 2000000}\n")
    text = helm("template", "shop", str(CHART), "-f", str(values))
    assert '"2000000"' in text
    assert '"2000000s"' in text
    assert "e+" not in text


@needs_helm
@pytest.mark.parametrize(
    ("settings", "error"),
    [
        (["--set", "pipeline.enabled=true"], "pipeline.files is empty"),
        (["--set", "pipeline.enabled=true,pipeline.replicas=2", "--set-file", FILES], "pipeline.storage.enabled=false"),
    ],
)
def test_pipeline_that_cannot_run_is_refused(settings: list[str], error: str) -> None:
    done = subprocess.run(
        ["helm", "template", "shop", str(CHART), *settings], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert error in done.stderr
