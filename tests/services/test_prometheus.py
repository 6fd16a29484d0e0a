"""A real Prometheus with a real app: alerts fire, every panel has data, lag of paused partitions grows."""

import json
import re
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from aioshard.telemetry.metrics import AppCollector
from tests.engine.telemetry.test_metrics import STATISTICS
from tests.support.brokers import SharedKafka
from tests.support.fake_app import FakeApp
from tests.support.paths import PROJECT
from tests.support.prometheus import Prometheus, PrometheusUnavailableError, hurried, programs, promtool
from tests.support.requirements import skip_or_fail
from tests.support.subprocesses import CommandProcess

RULES = PROJECT / "deploy/prometheus/aioshard.rules.yml"
DASHBOARD = PROJECT / "deploy/grafana/aioshard.json"

APP = """
from aioshard import App, Record, Retry

app = App({group!r}, bootstrap_servers={servers!r}, auto_offset_reset="earliest", stuck_after={stuck_after})


@app.consume({topic!r}, retry=Retry(attempts=2, initial=0.1))
async def on_order(record: Record) -> None:
    if record.value == b"poison":
        raise ValueError("no such customer")
    if record.value == b"pause":
        app.pause({topic!r}, 2, why="the ledger is being migrated")
"""
QUICK, POISONED, PAUSED = 0, 1, 2
STUCK_AFTER = 1


@pytest.fixture(autouse=True)
def _installed() -> None:
    try:
        programs()
    except PrometheusUnavailableError as missing:
        skip_or_fail("Prometheus", missing)


def test_the_configuration_and_the_rules_are_valid_and_each_alert_fires_when_it_should() -> None:
    promtool("check", "config", PROJECT / "deploy/prometheus/prometheus.yml")
    promtool("check", "rules", RULES)
    assert "SUCCESS" in promtool("test", "rules", PROJECT / "deploy/prometheus/aioshard.rules.test.yml")


def test_each_alert_has_a_test() -> None:
    tested = (RULES.parent / "aioshard.rules.test.yml").read_text()
    names = [line.split()[-1] for line in RULES.read_text().splitlines() if "- alert:" in line]
    assert names
    assert [name for name in names if tested.count(f"alertname: {name}\n") != 2] == []


def test_the_metrics_page_follows_the_prometheus_rules() -> None:
    registry = CollectorRegistry()
    AppCollector(FakeApp(STATISTICS), registry=registry)
    promtool("check", "metrics", page=generate_latest(registry))


@pytest.mark.chaos
async def test_alerts_fire_panels_have_data_and_paused_lag_grows(
    kafka: SharedKafka, topic: str, group: str, tmp_path: Path
) -> None:
    await kafka.create_topic(topic, partitions=3)
    (tmp_path / "shop.py").write_text(
        APP.format(group=group, servers=kafka.bootstrap, topic=topic, stuck_after=STUCK_AFTER)
    )
    running = await CommandProcess.start(tmp_path, "run", "shop:app", "--web")
    try:
        async with await running.health() as health:
            target = f"{health.base_url.host}:{health.base_url.port}"
            async with Prometheus(tmp_path, target, hurried(RULES.read_text())) as prometheus:
                await prometheus.until(f'aioshard_engine_state{{group="{group}",state="running"}} == 1')
                await kafka.produce(topic, [(None, b"pause")] * 20, partition=QUICK)
                await kafka.produce(topic, [(None, b"poison")], partition=POISONED)
                await check_paused(kafka, prometheus, topic)
                await check_poisoned(prometheus, health, topic, tmp_path)
                await check_panels(prometheus, group, topic)
                await check_variables(prometheus, group, topic)
    finally:
        await running.kill()


async def check_paused(kafka: SharedKafka, prometheus: Prometheus, topic: str) -> None:
    paused = f'{{topic="{topic}",partition="{PAUSED}"}}'
    await prometheus.until(f"aioshard_partition_paused{paused} == 1")
    for produced, lag in ((100, 100), (150, 250)):
        await kafka.produce(topic, [(None, b"later")] * produced, partition=PAUSED)
        await prometheus.until(f"aioshard_partition_lag_records{paused} == {lag}")


async def check_poisoned(prometheus: Prometheus, health: httpx.AsyncClient, topic: str, directory: Path) -> None:
    """A record that halts, five times as long as it takes to be stuck: alerts fire, all name it, nobody restarts it."""
    labels = f'{{topic="{topic}",partition="{POISONED}"}}'
    await prometheus.until(f"aioshard_oldest_incomplete_record_age_seconds{labels} > {5 * STUCK_AFTER}")
    stuck = await prometheus.firing("AioshardCommitStuck")
    assert (stuck["topic"], stuck["partition"]) == (topic, str(POISONED))
    halted = await prometheus.firing("AioshardRecordsHalted")
    assert halted["handler"] == "on_order"
    assert (await health.get("/livez")).status_code == httpx.codes.OK
    asking = await CommandProcess.start(directory, "explain", str(health.base_url))
    assert await asking.ends() == 0, asking.errors
    assert f"{topic}/{POISONED} has not advanced" in asking.output
    assert "no such customer" in asking.output
    shown = (await health.get("/dashboard.json")).json()
    (found,) = [partition for partition in shown["diagnosis"]["partitions"] if partition["partition"] == POISONED]
    assert (found["verdict"], found["head"]["offset"]) == ("stuck", 0)
    (failed,) = shown["workload"]["failed"]
    assert (failed["topic"], failed["partition"], failed["offset"], failed["state"]) == (topic, POISONED, 0, "halted")
    assert "no such customer" in failed["error"]


async def check_panels(prometheus: Prometheus, group: str, topic: str) -> None:
    """Every query of the dashboard, with its variables filled as Grafana does it, gives a series."""
    silent = []
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"].replace("$group", group).replace("$topic", topic)
            query = query.replace("$__rate_interval", "20s")
            assert "$" not in query
            if not await prometheus.query(query):
                silent.append((panel["title"], query))
    assert silent == []


async def check_variables(prometheus: Prometheus, group: str, topic: str) -> None:
    """Check the variables of the dashboard: Grafana queries the values of a label."""
    offered = {}
    for variable in json.loads(DASHBOARD.read_text())["templating"]["list"]:
        if variable["type"] == "query":
            asked = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
            assert asked is not None, variable["query"]
            series = await prometheus.query(asked[1].replace("$group", group))
            offered[variable["name"]] = {sample["metric"].get(asked[2]) for sample in series}
    assert offered == {"group": {group}, "topic": {topic}}
