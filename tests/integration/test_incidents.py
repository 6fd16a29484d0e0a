"""Alerts in incidents: those in the repository's recording, and those of incidents that are played again."""

import shutil
from pathlib import Path

import pytest

from tests.support.incidents import INCIDENTS, RECORDED, RULES, expectations, record, values
from tests.support.prometheus import PrometheusUnavailableError, programs, promtool
from tests.support.provision import skip_or_fail
from tests.support.shared_kafka import SharedKafka


@pytest.fixture(autouse=True)
def _installed() -> None:
    try:
        programs()
    except PrometheusUnavailableError as missing:
        skip_or_fail("Prometheus", str(missing))


def test_each_alert_fires_in_its_recorded_incident_and_none_in_a_deploy() -> None:
    recorded = RECORDED.read_text()
    assert [incident.name for incident in INCIDENTS if expectations(incident) not in recorded] == []
    assert "SUCCESS" in promtool("test", "rules", RECORDED)


@pytest.mark.chaos
@pytest.mark.timeout(600)
async def test_the_alerts_fire_in_incidents_that_are_played_again(
    kafka: SharedKafka, topic: str, tmp_path: Path
) -> None:
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
