"""The routes of a supervisor, without processes; with them they are in `tests/cli/test_workers.py`."""

from collections.abc import AsyncIterator, Callable, Iterable

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics import parser as open_metrics
from prometheus_client.parser import text_string_to_metric_families

from aioshard.web.answers import SAFE
from aioshard.web.supervised import supervised_application
from aioshard.web.workers import WorkerState

OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


class Waiting:
    """A supervisor whose worker does not run just now."""

    group_id = "billing"
    draining = False

    def workers(self) -> tuple[WorkerState, ...]:
        return (WorkerState("0", None, "nowhere", 3, "crashed (exit code 1)"),)


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=supervised_application(Waiting()))
    async with httpx.AsyncClient(transport=transport, base_url="http://supervisor") as made:
        yield made


@pytest.mark.parametrize(
    ("accept", "parse"),
    [("text/plain", text_string_to_metric_families), (OPENMETRICS, open_metrics.text_string_to_metric_families)],
    ids=["text", "OpenMetrics"],
)
async def test_metrics_come_in_the_form_that_is_asked_for(
    client: httpx.AsyncClient, accept: str, parse: Callable[[str], Iterable[Metric]]
) -> None:
    answer = await client.get("/metrics", headers={"accept": accept})

    assert answer.headers["content-type"].startswith(accept.partition(";")[0])
    found = {sample.name: sample for family in parse(answer.text) for sample in family.samples}
    assert found["aioshard_worker_up"].value == 0
    assert found["aioshard_worker_restarts_total"].value == 3
    assert found["process_resident_memory_bytes"].labels == {"worker": "supervisor"}


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/statistics.json", "/explain", "/metrics", "/", "/nothing"])
async def test_every_answer_has_the_headers_that_keep_pages_of_other_sites_out(
    client: httpx.AsyncClient, path: str
) -> None:
    answer = await client.get(path)

    assert SAFE.items() <= dict(answer.headers).items()
    assert (answer.status_code == 404) == (path in {"/", "/nothing"})
