"""Alerts in the recorded incidents of the repository and in replayed ones."""

import re
import shutil
from pathlib import Path

import pytest

from tests.support.brokers import SharedKafka
from tests.support.prometheus import PrometheusUnavailableError, programs, promtool
from tests.support.requirements import skip_or_fail
from tests.tools.incidents import HEAD, INCIDENTS, RECORDED, RULES, STEP, expectations, record, values


@pytest.fixture(autouse=True)
def _installed() -> None:
    try:
        programs()
    except PrometheusUnavailableError as missing:
        skip_or_fail("Prometheus", missing)


def test_each_alert_fires_in_its_recorded_incident_and_none_in_a_deploy() -> None:
    recorded = RECORDED.read_text()
    assert [incident.name for incident in INCIDENTS if expectations(incident) not in recorded] == []
    assert "SUCCESS" in promtool("test", "rules", RECORDED)


def test_stalls_without_partition_series_fire_the_same_alerts(tmp_path: Path) -> None:
    """As after the group membership was lost; in the recording the partitions keep their series in a rebalance."""
    shutil.copy(RULES, tmp_path)
    (stalls,) = re.findall(r"(?ms)^  - name: stalls\n.*?(?=^  # )", RECORDED.read_text())
    (rebalancing,) = re.findall(r'aioshard_rebalance_seconds_total{.*?"10.0.0.1:8080"}\'\s+values: \'(.*)\'', stalls)
    spent: list[float] = []
    for word in samples_of(rebalancing):
        spent.append(spent[-1] if word == "_" else float(word))
    away = {tick for tick in range(1, len(spent)) if spent[tick] - spent[tick - 1] > STEP / 2}
    assert len(away) > 15

    def without(series: re.Match[str]) -> str:
        words = enumerate(samples_of(series[2]))
        return series[1] + " ".join("stale" if tick in away else word for tick, word in words) + "'"

    gaps = re.sub(r"(series: 'aioshard_(?:partition|oldest).*\n +values: ')(.*)'", without, stalls)
    assert gaps.count("stale") > 2 * stalls.count("stale")
    (tmp_path / RECORDED.name).write_text(HEAD + gaps)
    assert "SUCCESS" in promtool("test", "rules", tmp_path / RECORDED.name)


def samples_of(written: str) -> list[str]:
    """One word for each sample, from promtool's notation."""
    samples = []
    for word in written.split():
        value, _, more = word.partition("x")
        samples += [value] * (int(more or 0) + (value != "_" or not more))
    return samples


@pytest.mark.chaos
@pytest.mark.timeout(600)
async def test_the_alerts_fire_in_replayed_incidents(kafka: SharedKafka, topic: str, tmp_path: Path) -> None:
    shutil.copy(RULES, tmp_path)
    (tmp_path / RECORDED.name).write_text(await record(kafka, topic))
    assert "SUCCESS" in promtool("test", "rules", tmp_path / RECORDED.name)


@pytest.mark.parametrize(
    ("samples", "scraped", "written"),
    [
        ({0: 1, 1: 1, 2: 1, 3: 2.5, 4: 2}, set(range(5)), "1x2 2.5 2"),
        ({2: 7}, set(range(5)), "_x2 7 stale _"),
        ({0: 1, 2: 3}, {0, 2}, "1 _ 3 _x2"),
        ({0: 123456789}, set(range(5)), "123456789 stale _x3"),
    ],
)
def test_samples_are_written_as_promtool_reads_them(samples: dict[int, float], scraped: set[int], written: str) -> None:
    assert values(samples, scraped, 4) == written
