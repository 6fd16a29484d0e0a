"""Web server processes, their readiness, and clients behind a load balancer."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import NamedTuple, Self

import httpx

from tests.support.paths import PROJECT
from tests.support.ports import free_port

END_TIMEOUT = 60.0
TAIL_LINES = 25


class Start(NamedTuple):
    """How long a process took until it was ready."""

    seconds: float
    in_line: float
    """Of these, how many it waited for a core: so busy was the machine with other things."""


class Server:
    """One uvicorn process; `with` ends it in the end.

    Attributes:
        base: Its address.
        began: When it was started, by the monotonic clock.
    """

    def __init__(self, target: str, log: Path, environment: Mapping[str, str], *options: str) -> None:
        port = free_port()
        self.base = f"http://127.0.0.1:{port}"
        self.began = time.monotonic()
        self._log = log
        command = [sys.executable, "-m", "uvicorn", target, f"--port={port}", "--no-access-log", *options]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                cwd=PROJECT,
                env={**os.environ, "PYTHONPATH": str(PROJECT), **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            error.add_note(self.tail)
        self.kill()

    @property
    def log(self) -> str:
        """All that it printed."""
        return self._log.read_text()

    @property
    def tail(self) -> str:
        """The last lines of that, for messages."""
        state = "alive" if self._process.poll() is None else f"exit code {self._process.returncode}"
        return "\n".join([f"--- {self._log.name}, {state}:", *self.log.splitlines()[-TAIL_LINES:]])

    def send(self, number: signal.Signals) -> None:
        """Sends it a signal."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and waits."""
        self._process.kill()
        self._process.wait()

    async def ended(self) -> int:
        """Waits for its end; returns the exit code."""
        return await asyncio.to_thread(self._process.wait, END_TIMEOUT)

    def _in_line(self) -> float:
        """Seconds for which its main thread could have run and no core was free."""
        waited = Path(f"/proc/{self._process.pid}/schedstat").read_text().split()[1]
        return int(waited) / 1e9

    async def until_ready(self, path: str, timeout: float = 60.0) -> "Start":
        """Waits for 200."""
        async with httpx.AsyncClient(base_url=self.base) as client, asyncio.timeout(timeout):
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if (await client.get(path)).status_code == 200:
                        return Start(time.monotonic() - self.began, self._in_line())
                if self._process.poll() is not None:
                    raise AssertionError(f"the server ended while it started\n{self.tail}")
                await asyncio.sleep(0.02)


class Balancer:
    """Probes servers as Kubernetes does, and learns late: a server counts as ready *delay* seconds longer than it is.

    Attributes:
        servers: Those that are probed, by name.
        rounds: How often all of them were probed.
        nobody: In how many of these none was ready.
        answers: How the requests ended.
    """

    def __init__(self, path: str, *, delay: float, every: float = 0.05) -> None:
        self.servers: dict[str, Server] = {}
        self.rounds = 0
        self.nobody = 0
        self.answers: Counter[str] = Counter()
        self._path = path
        self._delay = delay
        self._every = every
        self._last_ready: dict[Server, float] = {}
        self._ready: set[Server] = set()
        """The servers in the last probe."""
        self._choice = random.Random(1)

    @contextlib.asynccontextmanager
    async def probing(self) -> AsyncIterator[Self]:
        """Probes while the context is open; entered when all servers have been probed."""
        async with httpx.AsyncClient(timeout=5.0) as client:
            await self._probe_all(client)
            probing = asyncio.create_task(self._probe_steadily(client), name="probes")
            try:
                yield self
            finally:
                probing.cancel()
                await asyncio.wait([probing])
            if not probing.cancelled():
                probing.result()

    async def _probe_steadily(self, client: httpx.AsyncClient) -> None:
        while True:
            ready = await self._probe_all(client)
            self.rounds += 1
            self.nobody += not any(ready)
            await asyncio.sleep(self._every)

    async def _probe_all(self, client: httpx.AsyncClient) -> list[bool]:
        return await asyncio.gather(*(self._probe(client, server) for server in self.servers.values()))

    async def _probe(self, client: httpx.AsyncClient, server: Server) -> bool:
        asked = time.monotonic()
        try:
            ready = (await client.get(server.base + self._path)).status_code == 200
        except httpx.TransportError:
            ready = False
        if ready:
            self._last_ready[server] = asked
            self._ready.add(server)
        else:
            self._ready.discard(server)
        return ready

    @property
    def backends(self) -> list[Server]:
        """Those that are ready, or were within *delay*, the one for whom that is longest ago first."""
        now = time.monotonic()
        known = sorted(self._last_ready.items(), key=lambda one: one[1])
        return [server for server, at in known if server in self._ready or now - at <= self._delay]

    async def put(self, client: httpx.AsyncClient, path: str, body: object) -> None:
        """Sends a request to one of those; counts how it ended.

        Half of the requests go where readiness was seen last: a server that is going away gets more than its share.
        """
        backends = self.backends
        if not backends:
            self.answers["nobody to ask"] += 1
            return
        server = backends[0] if self._choice.random() < 0.5 else self._choice.choice(backends)
        try:
            answer = await client.put(server.base + path, json=body)
        except httpx.TransportError as error:
            self.answers[f"{type(error).__name__}: {error}"] += 1
        else:
            self.answers[str(answer.status_code)] += 1
