"""The compose file and the manifests: schemas, existing settings, consistent times and sizes."""

import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from starlette.applications import Starlette

from aioshard import App
from aioshard.core.assignment import ASSIGNORS, Assignment, Member
from aioshard.settings import Settings, misspelled_variables
from aioshard.telemetry.metrics import METRICS
from tests.project.docs.tables import DOCS, context_of
from tests.support.certificates import make_certificates
from tests.support.checkers import checked
from tests.support.kafka import KafkaBroker
from tests.support.kafka_libs import NEWEST, BrokerUnavailableError
from tests.support.paths import PROJECT
from tests.support.requirements import skip_or_fail

DEPLOY = PROJECT / "deploy"
COMPOSE = DEPLOY / "compose.yaml"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
MIB = 2**20
HEALTH_SERVER = 1.0
"""Seconds that requests to the health server get when `aioshard run` ends."""


def documents(*pages: Path) -> Iterator[dict[str, Any]]:
    for page in pages:
        yield from (found for found in yaml.safe_load_all(page.read_text()) if found)


def keda() -> list[dict[str, Any]]:
    return [document for document in documents(*MANIFESTS) if document["apiVersion"].startswith("keda.sh/")]


WORKLOADS = {
    page.stem: document
    for page in MANIFESTS
    for document in documents(page)
    if document["kind"] in {"Deployment", "StatefulSet"}
}


@pytest.fixture(params=WORKLOADS)
def workload(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = WORKLOADS[request.param]
    return found


def pod(workload: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = workload["spec"]["template"]["spec"]
    return found


def container(workload: dict[str, Any]) -> dict[str, Any]:
    (found,) = pod(workload)["containers"]
    assert isinstance(found, dict)
    return found


def variables(workload: dict[str, Any]) -> dict[str, str]:
    """Return the environment of the process, with references resolved in the map and the secret."""
    named = {(document["kind"], document["metadata"]["name"]): document for document in documents(*MANIFESTS)}
    found: dict[str, str] = {}
    for source in container(workload).get("envFrom", ()):
        found |= named["ConfigMap", source["configMapRef"]["name"]]["data"]
    for variable in container(workload)["env"]:
        origin = variable["valueFrom"]
        if "secretKeyRef" in origin:
            reference = origin["secretKeyRef"]
            found[variable["name"]] = named["Secret", reference["name"]]["stringData"][reference["key"]]
        else:
            assert origin["fieldRef"]["fieldPath"] == "metadata.name"
            found[variable["name"]] = f"{workload['metadata']['name']}-0"
    return found


def settings(found: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Settings:
    """As a process with these variables reads them; a file that is mounted is there."""
    mounted = make_certificates(tmp_path).ca_file
    for name, value in found.items():
        monkeypatch.setenv(name, str(mounted) if name == "AIOSHARD_SSL_CAFILE" else value)
    assert misspelled_variables() == []
    return Settings()


# Schemas -------------------------------------------------------------------------------------


def test_the_compose_file_is_valid() -> None:
    checked("check-jsonschema", "--builtin-schema", "vendor.compose-spec", COMPOSE)


def test_kubernetes_knows_every_field_of_the_manifests() -> None:
    known = [page for page in MANIFESTS if not page.stem.startswith("autoscaling")]

    assert len(known) >= 4
    checked("kubernetes-validate", "--strict", *known)


def test_keda_knows_every_field(tmp_path: Path) -> None:
    """KEDA's own schema is not on any package index; ours has the fields that its documentation names."""
    for number, document in enumerate(keda()):
        page = tmp_path / f"{number}.yaml"
        page.write_text(yaml.safe_dump(document))
        checked("check-jsonschema", "--schemafile", PROJECT / "tests" / "project" / "deploy" / "keda.schema.json", page)
    assert len(keda()) == 3


# Settings and commands ---------------------------------------------------------------------


def test_variables_of_the_manifests_are_consistent_settings(
    workload: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = settings(variables(workload), monkeypatch, tmp_path)

    assert found.security_protocol == "SASL_SSL"
    assert found.sasl_username == "billing"
    assert (found.group_instance_id is not None) == (workload["kind"] == "StatefulSet")


def test_variables_of_the_compose_file_are_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    app = yaml.safe_load(COMPOSE.read_text())["services"]["app"]

    found = settings(app["environment"], monkeypatch, tmp_path)

    assert found.require_bootstrap_servers() == "kafka:19092"
    assert seconds(app["stop_grace_period"]) > HEALTH_SERVER + found.shutdown_timeout


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


def test_a_named_file_is_mounted(workload: dict[str, Any]) -> None:
    (mount,) = container(workload)["volumeMounts"]
    (volume,) = pod(workload)["volumes"]
    (item,) = volume["secret"]["items"]

    assert variables(workload)["AIOSHARD_SSL_CAFILE"] == f"{mount['mountPath']}/{item['path']}"
    assert mount["name"] == volume["name"]


def test_the_container_command_is_valid(workload: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    program, *arguments = container(workload)["args"]
    monkeypatch.syspath_prepend(str(DEPLOY / "app"))
    if program == "uvicorn":
        web = runpy.run_path(str(DEPLOY / "app" / "web.py"))
        assert isinstance(web["api"], Starlette)
        assert arguments[0] == "web:api"
        port = arguments[arguments.index("--port") + 1]
    else:
        context = context_of(arguments[0])
        parsed, *_ = context.command.make_parser(context).parse_args(arguments[1:])
        port = parsed["health_port"]
        assert isinstance(runpy.run_path(str(DEPLOY / "app" / "billing.py"))["app"], App)
    (exposed,) = container(workload)["ports"]
    assert exposed["containerPort"] == int(port)
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container(workload)[probe]["httpGet"]["port"] == exposed["name"]
    annotations = workload["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == port


# Times and sizes ----------------------------------------------------------------------------


def test_a_pod_is_killed_only_after_its_longest_shutdown(
    workload: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """graceful + shutdown_timeout + preStop < terminationGracePeriodSeconds"""
    found = settings(variables(workload), monkeypatch, tmp_path)
    arguments = container(workload)["args"]
    server = arguments[0] == "uvicorn"
    graceful = float(arguments[arguments.index("--timeout-graceful-shutdown") + 1]) if server else HEALTH_SERVER
    before = container(workload).get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)

    grace = pod(workload)["terminationGracePeriodSeconds"]
    assert graceful + found.shutdown_timeout + before < grace
    assert (before > 0) == server, "requests come to a server, so it has to be taken out of the service first"


def test_the_memory_limit_covers_the_buffers(
    workload: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The bound of benchmark P6 above an idle process, and 64 MiB for the handlers."""
    found = settings(variables(workload), monkeypatch, tmp_path)
    idle, own = 48, 64
    resources = container(workload)["resources"]
    limit = int(resources["limits"]["memory"].removesuffix("Mi"))

    assert limit >= idle + 2 * found.max_buffered_bytes / MIB + 50 + own
    assert resources["requests"]["memory"] == resources["limits"]["memory"]
    assert "cpu" not in resources["limits"]


def test_a_blocking_handler_is_reported_before_the_pod_restarts(
    workload: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = settings(variables(workload), monkeypatch, tmp_path)
    probe = container(workload)["livenessProbe"]

    # A separate server says 503 after the session timeout; one that shares the loop does not respond at all.
    before = 0.0 if container(workload)["args"][0] == "uvicorn" else found.session_timeout
    assert before + probe["periodSeconds"] * probe["failureThreshold"] >= found.stuck_after
    assert probe["httpGet"]["path"] == "/livez"
    assert container(workload)["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_no_autoscaler_exceeds_the_partitions() -> None:
    topics = yaml.safe_load(COMPOSE.read_text())["services"]["topics"]["command"]
    partitions = int(next(word for word in topics if word.startswith("--partitions=")).partition("=")[2])
    objects = [document["spec"] for document in keda() if document["kind"] == "ScaledObject"]

    assert len(objects) == 2
    for found in objects:
        assert 1 <= found["minReplicaCount"] <= found["maxReplicaCount"] <= partitions
        assert found["scaleTargetRef"]["name"] == WORKLOADS["deployment"]["metadata"]["name"]
        rules = found["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        assert rules["scaleDown"]["stabilizationWindowSeconds"] > rules["scaleUp"]["stabilizationWindowSeconds"]


def test_an_autoscaler_queries_existing_group_topic_and_metrics() -> None:
    (app,) = [value for value in runpy.run_path(str(DEPLOY / "app" / "billing.py")).values() if isinstance(value, App)]
    triggers = {
        trigger["type"]: trigger["metadata"] for found in keda() for trigger in found["spec"].get("triggers", ())
    }
    kafka, prometheus = triggers["kafka"], triggers["prometheus"]

    assert (kafka["consumerGroup"], kafka["topic"]) == (app.group_id, app.handlers[0].topics[0])
    assert kafka["offsetResetPolicy"] == app.settings.auto_offset_reset
    assert set(re.findall(r"aioshard_\w+", prometheus["query"])) <= METRICS.keys()
    assert re.findall(r'group="(\w+)"', prometheus["query"]) == [app.group_id]
    assert float(prometheus["threshold"]) == pytest.approx(0.8 * app.handlers[0].concurrency, abs=1)


def test_fewer_partitions_move_when_the_new_pod_starts_first() -> None:
    """12 partitions on 3 pods, with the default assignor."""

    def moved(*memberships: tuple[str, ...]) -> int:
        owned: Assignment = {}
        count = 0
        for names in memberships:
            members = {
                name: Member(topics=frozenset({"orders"}), owned=tuple(owned.get(name, ())), generation=1)
                for name in names
            }
            given = ASSIGNORS[Settings().assignor](members, {"orders": range(12)})
            before = {place: name for name, places in owned.items() for place in places}
            after = {place: name for name, places in given.items() for place in places}
            count += sum(before.get(place, name) != name for place, name in after.items())
            owned = given
        return count

    old, surging = ("a", "b", "c"), ("a", "b", "c", "d")
    page = " ".join((DOCS / "deploying.md").read_text().split())
    assert f"3 pods, {moved(old, surging, ('b', 'c', 'd'))} move for each pod" in page
    assert f"it is {moved(old, ('b', 'c'), ('b', 'c', 'd'))}, and" in page
    assert WORKLOADS["deployment"]["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


# The compose file ---------------------------------------------------------------------------


def test_the_mounts_of_the_compose_file_exist() -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    volumes = [volume.split(":")[0] for service in services.values() for volume in service.get("volumes", ())]
    mounted = [name for name in volumes if name.startswith(".")]

    assert [name for name in mounted if not (DEPLOY / name).exists()] == []
    assert mounted == [
        "./prometheus",
        "./grafana/provisioning",
        "./grafana/aioshard.json",
    ]


def test_grafana_finds_the_dashboard_and_prometheus() -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    provisioning = DEPLOY / "grafana" / "provisioning"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "aioshard.yaml").read_text())["providers"]
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    targets = [volume.split(":")[1] for volume in services["grafana"]["volumes"]]

    assert f"{provider['options']['path']}/aioshard.json" in targets
    assert source["url"] == "http://prometheus:9090"


def test_the_compose_file_uses_the_broker_version_of_the_tests() -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"]

    assert services["kafka"]["image"] == services["topics"]["image"] == f"apache/kafka:{NEWEST}"
    for service in services.values():
        assert service["image"] == "billing" or re.search(r":v?\d+\.\d+\.\d+$", service["image"])


@pytest.mark.chaos
@pytest.mark.kafka
async def test_a_broker_starts_with_the_compose_settings(tmp_path: Path) -> None:
    """The image makes a property of each variable; ports and names are those of this machine here."""
    environment = yaml.safe_load(COMPOSE.read_text())["services"]["kafka"]["environment"]
    broker = KafkaBroker(tmp_path)
    ports = broker.ports
    here = {
        r"//(kafka)?:19092": f"//127.0.0.1:{ports.plain}",
        r"//(localhost)?:9092": f"//127.0.0.1:{ports.secure}",
        r"(//|kafka):9093": rf"\g<1>127.0.0.1:{ports.controller}",
        r"kafka(127.0.0.1)": r"\1",
        r"/var/lib/kafka/data": str(tmp_path / "data"),
    }
    for name, value in environment.items():
        for found, instead in here.items():
            value = re.sub(found, instead, value)  # noqa: PLW2901  (one text after the other)
        broker.properties[name.removeprefix("KAFKA_").lower().replace("_", ".")] = value
    try:
        await broker.start()
    except BrokerUnavailableError as missing:
        skip_or_fail("Kafka broker", missing)
    try:
        await broker.create_topic("orders", 12)
        await broker.produce("orders", [(b"alice", b"{}")] * 10)
        broker.bootstrap = f"127.0.0.1:{ports.secure}"  # the listener for the host
        assert len(await broker.read("orders")) == 10
    finally:
        await broker.kill()


def test_the_compose_file_opens_no_port_to_the_network() -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"]

    ports = [port for service in services.values() for port in service.get("ports", ())]
    assert ports
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []


def test_the_page_lists_every_file() -> None:
    page = (DOCS / "deploying.md").read_text()
    own = [*DEPLOY.glob("*.*"), *DEPLOY.glob("*file"), *DEPLOY.glob("app/*.py"), *MANIFESTS]

    assert len(own) >= 10
    assert [name for file in own if (name := str(file.relative_to(PROJECT))) not in page] == []
