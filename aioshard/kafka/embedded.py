"""A broker that needs neither Java nor a network: librdkafka's mock cluster in a child process."""

import asyncio
import collections
import contextlib
import importlib.util
import json
import logging
import signal
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from aioshard.errors import MissingExtraError, StateError, TransportError
from aioshard.kafka.forwarding import Forwarder
from aioshard.records import TOPIC_NAME

__all__ = ["DEFAULT_PARTITIONS", "RETAINED_BATCHES", "RETAINED_BYTES", "EmbeddedBroker"]

logger = logging.getLogger("aioshard.kafka.embedded")

DEFAULT_PARTITIONS = 4
"""Partitions of a topic that is created on first use."""
RETAINED_BYTES = 5 * 1024 * 1024
"""Limit per partition; older records are dropped silently. Counts stored bytes, so compressed batches as compressed."""
RETAINED_BATCHES = 100_000
"""Limit per partition, in addition to `RETAINED_BYTES`."""

_SESSION_TIMEOUT = 3.0
_HEARTBEAT_INTERVAL = 0.5
"""Every rebalance on this broker takes the session time-out minus one second, regardless of the members. That includes
the first join after an app has left. With the default of 45 s, a restarted app would not start in time."""

_SCRIPT = Path(__file__).with_name("mock_cluster.py")
_START_TIMEOUT = 10.0
_END_TIMEOUT = 5.0
_LAST_LINES = 20
_JOIN_DELAY = "rd_kafka_mock_group_initial_rebalance_delay_ms"


class EmbeddedBroker:
    """A Kafka broker in memory for demonstrations, quick starts and tests with one member.

    It speaks the Kafka protocol on 127.0.0.1, so any client in any process can use it. It ends with the process that
    started it, even if that process is killed. It does not behave like a real broker in every way:

    * a partition keeps only its newest `RETAINED_BYTES` or `RETAINED_BATCHES`, depending on which limit it hits first;
    * a commit during a rebalance is refused, so a rebalance repeats records; each rebalance of a group takes its
      session time-out minus one second; static membership is ignored;
    * no transactions, no compaction, no TLS and no users; all data is lost when it ends.

    Owned by the event loop that started it.

    Example:
        ```python
        async with EmbeddedBroker() as broker:
            await broker.create_topic("orders", partitions=8)
            app = App("billing", **broker.settings, auto_offset_reset="earliest")
        ```
    """

    def __init__(self, *, port: int | None = None) -> None:
        """Make a broker; starts nothing yet.

        Args:
            port: The port on 127.0.0.1; None picks a free one.
        """
        self._port = port
        self._forwarder: Forwarder | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._said: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)
        self._answers: collections.deque[asyncio.Future[dict[str, Any]]] = collections.deque()
        self._ended = asyncio.Event()
        self._servers = ""

    # Life -----------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Start the broker; returns once it accepts connections.

        Raises:
            MissingExtraError: confluent-kafka, which contains the broker, is not installed.
            TransportError: The broker did not start, or the port is in use.
        """
        if self._process is not None:
            raise StateError("this embedded broker was started before: make a new one")
        library = _library()
        try:
            await self._start(library)
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop the broker and discard its data."""
        await self._end()

    async def _start(self, library: str) -> None:
        port = None
        if self._port is not None:
            # The mock cluster cannot choose its port, so we forward the chosen one to it.
            self._forwarder = Forwarder(self._port)
            await self._forwarder.open()
            port = self._forwarder.port
        arguments = [sys.executable, "-P", str(_SCRIPT), library, *([] if port is None else [str(port)])]
        self._process = process = await asyncio.create_subprocess_exec(
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        started = self._expect_answer()
        self._tasks = [
            asyncio.create_task(self._read_answers(process), name="embedded broker answers"),
            asyncio.create_task(self._read_complaints(process), name="embedded broker complaints"),
        ]
        try:
            async with asyncio.timeout(_START_TIMEOUT):
                answer = await started
        except TimeoutError:
            raise TransportError(f"the embedded broker did not start within {_START_TIMEOUT:g} s") from None
        if "error" in answer:
            raise TransportError(f"the embedded broker did not start: {answer['error']}")
        self._servers = answer["bootstrap_servers"]
        if self._forwarder is not None:
            self._forwarder.forward_to(self._servers)
            self._servers = f"127.0.0.1:{port}"
        if _JOIN_DELAY in answer["missing"]:
            logger.warning("librdkafka %s delays the first join of a group by 3 s", answer["librdkafka"])

    async def _end(self) -> None:
        process = self._process
        try:
            if self._forwarder is not None:
                await self._forwarder.close()
            if process is not None and process.returncode is None:
                assert process.stdin is not None  # noqa: S101 - it was asked for
                process.stdin.close()
                async with asyncio.timeout(_END_TIMEOUT):
                    await process.wait()
        except TimeoutError:
            logger.warning("the embedded broker did not end within %g s and is killed", _END_TIMEOUT)
        finally:
            if process is not None and process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            # Both tasks end with the process's output.
            await asyncio.gather(*self._tasks)

    @property
    def bootstrap_servers(self) -> str:
        """The address, `127.0.0.1:port`.

        Raises:
            StateError: The broker was not started.
        """
        if not self._servers:
            raise StateError("the embedded broker was not started: use `async with EmbeddedBroker() as broker:`")
        return self._servers

    @property
    def settings(self) -> dict[str, Any]:
        """Settings for an app on this broker: its address, and membership time-outs that suit it.

        Raises:
            StateError: The broker was not started.
        """
        return {
            "bootstrap_servers": self.bootstrap_servers,
            "session_timeout": _SESSION_TIMEOUT,
            "heartbeat_interval": _HEARTBEAT_INTERVAL,
        }

    @property
    def pid(self) -> int:
        """The id of the broker's process.

        Raises:
            StateError: The broker was not started.
        """
        return self._running().pid

    async def ended(self) -> str:
        """Wait until the broker's process ends by itself; return a sentence that says how it ended."""
        await self._ended.wait()
        process = self._running()
        return f"the embedded broker ended by itself ({_ending(await process.wait())}){self._complaints()}"

    def _running(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise StateError("the embedded broker was not started: use `async with EmbeddedBroker() as broker:`")
        return self._process

    def _complaints(self) -> str:
        return f"; it said: {' | '.join(self._said)}" if self._said else ""

    # Topics ---------------------------------------------------------------------------

    async def create_topic(self, name: str, partitions: int = DEFAULT_PARTITIONS) -> None:
        """Create a topic. A topic created on first use has `DEFAULT_PARTITIONS`.

        Raises:
            TransportError: The topic exists, its name or number of partitions is invalid, or the broker is gone.
        """
        if not TOPIC_NAME.fullmatch(name):
            raise TransportError(
                f"{name!r} is no topic name: 1 to 249 of a-z, A-Z, 0-9, '.', '_' and '-' were expected"
            )
        if partitions < 1:
            raise TransportError(f"topic {name!r} cannot have {partitions} partitions: at least 1 was expected")
        answer = await self._ask({"create_topic": name, "partitions": partitions})
        if "error" in answer:
            raise TransportError(f"the embedded broker refused: {answer['error']}")

    # Talking to the process -----------------------------------------------------------

    async def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        process = self._running()
        if self._ended.is_set() or process.stdin is None:
            raise TransportError(await self.ended())
        answered = self._expect_answer()
        process.stdin.write(f"{json.dumps(command)}\n".encode())
        return await answered

    def _expect_answer(self) -> asyncio.Future[dict[str, Any]]:
        """Queue a future for the next answer; answers come in the order of the commands."""
        answered: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers.append(answered)
        return answered

    async def _read_answers(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None  # noqa: S101 - it was asked for
        async for line in process.stdout:
            answered = self._answers.popleft()
            if not answered.done():
                answered.set_result(json.loads(line))
        code = await process.wait()
        self._ended.set()
        for answered in self._answers:
            if not answered.done():
                answered.set_result({"error": f"its process ended ({_ending(code)}){self._complaints()}"})
        self._answers.clear()

    async def _read_complaints(self, process: asyncio.subprocess.Process) -> None:
        """Keep the last lines of stderr. Reading also keeps the pipe empty: a full one would block the broker."""
        assert process.stderr is not None  # noqa: S101 - it was asked for
        async for line in process.stderr:
            self._said.append(line.decode(errors="replace").strip())


def _ending(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def _library() -> str:
    """Return the path of a shared library with librdkafka's functions.

    Raises:
        MissingExtraError: confluent-kafka is not installed.
    """
    found = importlib.util.find_spec("confluent_kafka")
    if found is None or found.origin is None:
        raise MissingExtraError("the embedded broker", "broker")
    package = Path(found.origin).parent
    for place, pattern in (
        (package.with_name("confluent_kafka.libs"), "librdkafka*"),  # Linux and Windows
        (package / ".dylibs", "librdkafka*"),  # macOS
        # Built from source: looking up a function in the extension module also searches the libraries it links to.
        (package, "cimpl*.so"),
    ):
        for path in sorted(place.glob(pattern)):
            return str(path)
    raise TransportError(f"confluent-kafka in {package} does not contain librdkafka: install its wheel")
