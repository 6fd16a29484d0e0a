"""A real Prometheus with the targets of a test, and promtool."""

import asyncio
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Self

import httpx

from tests.support.ports import free_port

PROGRAMS = ("prometheus", "promtool")
DEADLINE = 40.0
TURN = 0.2
"""Seconds between two looks: Prometheus tells nobody when something has changed."""


class PrometheusUnavailableError(RuntimeError):
    """This machine has no Prometheus; the message says how to get it."""


class PrometheusFailedError(RuntimeError):
    """It ended, or did not show in time what was waited for."""


def programs() -> tuple[str, str]:
    """Prometheus and promtool, where PATH has them.

    Raises:
        PrometheusUnavailableError: One is missing.
    """
    found = [shutil.which(name) for name in PROGRAMS]
    if found[0] is None or found[1] is None:
        raise PrometheusUnavailableError(
            f"PATH lacks {' or '.join(PROGRAMS)}: install them, on Debian with `apt-get install prometheus`"
        )
    return found[0], found[1]


def promtool(*arguments: str | Path, page: bytes | None = None) -> str:
    """Return the output of promtool; *page* is its standard input.

    Raises:
        PrometheusUnavailableError: There is none.
        PrometheusFailedError: It found something.
    """
    done = subprocess.run([programs()[1], *arguments], input=page, capture_output=True, timeout=DEADLINE, check=False)
    said = (done.stdout + done.stderr).decode()
    if done.returncode != 0:
        raise PrometheusFailedError(said)
    return said


class Prometheus:
    """A server with its own directory that scrapes and evaluates twice a second.

    Example:
        async with Prometheus(tmp_path, "127.0.0.1:8080", rules) as prometheus:
            await prometheus.firing("AioshardRecordsHalted")
    """

    def __init__(self, directory: Path, target: str, rules: str) -> None:
        self._directory = directory
        self._config = directory / "prometheus.yml"
        self._config.write_text(
            "global: {scrape_interval: 500ms, scrape_timeout: 500ms, evaluation_interval: 500ms}\n"
            "rule_files: [rules.yml]\n"
            f"scrape_configs: [{{job_name: aioshard, static_configs: [{{targets: ['{target}']}}]}}]\n"
        )
        (directory / "rules.yml").write_text(rules)
        self._process: asyncio.subprocess.Process | None = None
        self._client = httpx.AsyncClient(timeout=DEADLINE)

    async def __aenter__(self) -> Self:
        address = f"127.0.0.1:{free_port()}"
        log = (self._directory / "prometheus.log").open("wb")
        with log:
            self._process = await asyncio.create_subprocess_exec(
                programs()[0],
                f"--config.file={self._config}",
                f"--storage.tsdb.path={self._directory / 'data'}",
                f"--web.listen-address={address}",
                stdout=log,
                stderr=log,
            )
        self._client.base_url = httpx.URL(f"http://{address}")
        try:
            await self._until(self._is_ready, "it is ready")
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def _is_ready(self) -> bool:
        try:
            return (await self._client.get("/-/ready")).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    async def _until(self, check: Any, what: str) -> Any:
        """Ask until there is an answer."""
        try:
            async with asyncio.timeout(DEADLINE):
                while not (found := await check()):
                    assert self._process is not None
                    if self._process.returncode is not None:
                        break
                    await asyncio.sleep(TURN)
                else:
                    return found
        except TimeoutError:
            pass
        log = (self._directory / "prometheus.log").read_text()[-2_000:]
        raise PrometheusFailedError(f"it never came to this: {what}\n{log}")

    async def query(self, expression: str) -> list[dict[str, Any]]:
        """The series that an expression gives now."""
        answer = (await self._client.get("/api/v1/query", params={"query": expression})).json()
        assert answer["status"] == "success", answer
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    async def value(self, expression: str) -> float:
        """The number that an expression of one series gives, waited for."""
        (series,) = await self._until(lambda: self.query(expression), f"{expression} gives a series")
        return float(series["value"][1])

    async def until(self, expression: str) -> None:
        """Wait until an expression gives a series."""
        await self._until(lambda: self.query(expression), f"{expression} gives a series")

    async def firing(self, alert: str) -> dict[str, str]:
        """Wait until an alert fires; returns its labels and annotations."""

        async def look() -> dict[str, str]:
            alerts = (await self._client.get("/api/v1/alerts")).json()["data"]["alerts"]
            ours = [each for each in alerts if each["labels"]["alertname"] == alert and each["state"] == "firing"]
            return {**ours[0]["labels"], **ours[0]["annotations"]} if ours else {}

        found: dict[str, str] = await self._until(look, f"{alert} fires")
        return found


def hurried(rules: str) -> str:
    """Alert rules that wait for a second where they waited for minutes."""
    return re.sub(r"(?m)^( +for): \w+$", r"\1: 1s", rules).replace("> 300", "> 3")
