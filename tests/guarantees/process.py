"""A member process: started, queried, stopped, frozen, killed."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.guarantees.behaviour import VARIABLE, Behaviour
from tests.support.paths import PROJECT

POLL_INTERVAL = 0.02
ANSWER_TIMEOUT = 30.0
TAIL_LINES = 25


class Member:
    """One process of the group.

    Attributes:
        process: Its name in the observations: the member's, and how often that was started.
        began: When it was started, in nanoseconds of the monotonic clock.
    """

    def __init__(self, behaviour: Behaviour) -> None:
        self.process = behaviour.process
        self._directory = Path(behaviour.directory)
        self._log = self._directory / f"{self.process}.log"
        self._orders = 0
        environment = os.environ | {VARIABLE: behaviour.json(), "PYTHONPATH": str(PROJECT), "PYTHONFAULTHANDLER": "1"}
        command = [sys.executable, "-m", "aioshard", "run", "tests.guarantees.member:app"]
        self.began = time.monotonic_ns()
        with self._log.open("ab") as log:
            self._popen = subprocess.Popen(
                command, cwd=PROJECT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    @property
    def pid(self) -> int:
        """Its process."""
        return self._popen.pid

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""
        return self._popen.poll() is None

    @property
    def sample(self) -> dict[str, Any]:
        """The latest sample of its statistics, empty before the first one; see `member.Report`."""
        file = self._directory / f"{self.process}.json"
        sample: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        return sample

    @property
    def statistics(self) -> dict[str, Any]:
        """`Statistics.asdict()` of the latest sample."""
        statistics: dict[str, Any] = self.sample.get("statistics", {"state": "not started", "partitions": []})
        return statistics

    @property
    def explanation(self) -> str:
        """The result of `App.explain` in the latest sample; empty if that is not sampled."""
        return str(self.sample.get("explanation", ""))

    @property
    def partitions(self) -> dict[int, dict[str, Any]]:
        """The statistics of the partitions that it owns and may work on."""
        return {found["partition"]: found for found in self.statistics["partitions"] if not _is_closed(found)}

    @property
    def owned(self) -> set[tuple[str, int]]:
        """Topic and partition of those, where it handles more than one topic."""
        return {
            (found["topic"], found["partition"]) for found in self.statistics["partitions"] if not _is_closed(found)
        }

    @property
    def log(self) -> str:
        """All that it printed."""
        return self._log.read_text()

    @property
    def tail(self) -> str:
        """The last printed lines, for messages."""
        lines = self.log.splitlines()[-TAIL_LINES:]
        return "\n".join([f"--- {self.process}, {'alive' if self.alive else self._popen.returncode}:", *lines])

    async def order(self, method: str, *arguments: Any) -> str | None:
        """Has a method of its app called from a thread; returns the sentence with which it refused, if it did."""
        self._orders += 1
        order = self._directory / f"{self.process}.{self._orders}.order"
        answer = order.with_suffix(".answer")
        written = order.with_suffix(".asked")
        written.write_text(json.dumps([method, arguments]))
        written.replace(order)
        give_up = time.monotonic() + ANSWER_TIMEOUT
        while not answer.exists():
            if time.monotonic() > give_up:
                raise AssertionError(f"no answer to {method}{arguments} within {ANSWER_TIMEOUT:g} s\n{self.tail}")
            await asyncio.sleep(POLL_INTERVAL)
        refusal: str | None = json.loads(answer.read_text())
        return refusal

    def terminate(self) -> None:
        """SIGTERM."""
        self._popen.send_signal(signal.SIGTERM)

    async def ended(self, timeout: float = 30.0) -> int:
        """Waits for the end; returns the exit code."""
        return await asyncio.to_thread(self._popen.wait, timeout)

    async def stop(self, timeout: float = 30.0) -> int:
        """SIGTERM, and waits; returns the exit code."""
        self.terminate()
        return await self.ended(timeout)

    def freeze(self) -> None:
        """Freezes the process until `thaw`."""
        self._popen.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Resumes a frozen process."""
        self._popen.send_signal(signal.SIGCONT)

    async def kill(self) -> None:
        """SIGKILL, and waits."""
        self._popen.kill()
        await self.ended()


def _is_closed(partition: Mapping[str, Any]) -> bool:
    paused = partition["paused"]
    return paused is not None and ("rebalancing" in paused or "draining" in paused)
