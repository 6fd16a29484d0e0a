"""A broker that needs neither Java nor a network: librdkafka's mock cluster in a child process."""

import asyncio
import contextlib
import importlib.util
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any, Self

from aioshard.errors import MissingExtraError, StateError, TransportError, signal_name
from aioshard.records import TOPIC_NAME

logger = logging.getLogger("aioshard.kafka.embedded")

DEFAULT_PARTITIONS = 4
"""Partitions of a topic that is created on first use."""
RETAINED_BYTES = 5 * 1024 * 1024
"""Limit per partition; older records are dropped silently. Counts stored bytes, so compressed batches as compressed."""
RETAINED_BATCHES = 100_000
"""Limit per partition, in addition to `RETAINED_BYTES`."""

_SESSION_TIMEOUT = 3.0
_HEARTBEAT_INTERVAL = 0.5
"""Every rebalance on this broker takes the session timeout minus one second, regardless of the members. That includes
the first join after an app has left. With the default of 45 s, a restarted app would not start in time."""

_SCRIPT = Path(__file__).with_name("mock_cluster.py")
_START_TIMEOUT = 10.0
_END_TIMEOUT = 5.0
_CHUNK = 256 * 1024


class EmbeddedBroker:
    """A Kafka broker in memory for demonstrations, quick starts and tests with one member.

    It speaks the Kafka protocol on 127.0.0.1, so any client in any process can use it. It ends with the process that
    started it, even if that process is killed. It does not behave like a real broker in every way:

    * a partition keeps only its newest `RETAINED_BYTES` or `RETAINED_BATCHES`, depending on which limit it hits first;
    * a commit during a rebalance is refused, so a rebalance repeats records; each rebalance of a group takes its
      session timeout minus one second; static membership is ignored;
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
        self._server: asyncio.Server | None = None
        """Forwards the chosen port, because the mock cluster cannot choose its own."""
        self._address = ""
        """Where the mock cluster listens."""
        self._process: asyncio.subprocess.Process | None = None
        self._command_lock = asyncio.Lock()

    # Lifecycle ------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Start the broker; returns once it accepts connections.

        Raises:
            MissingExtraError: confluent-kafka, which contains the broker, is not installed.
            TransportError: The broker did not start, or the port is in use.
        """
        if self._process is not None:
            raise StateError("this embedded broker was started before: make a new one")
        try:
            await self._start(_library())
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(self, *_error: object) -> None:
        """Stop the broker and discard its data."""
        await self._end()

    async def _start(self, library: str) -> None:
        arguments = [sys.executable, "-P", str(_SCRIPT), library]
        if self._port is not None:
            arguments.append(str(self._port))
            try:
                self._server = await asyncio.start_server(
                    self._forward, "127.0.0.1", self._port, limit=_CHUNK, start_serving=False
                )
            except OSError as error:
                # Python adds the address to the system's error text, but our message already contains it.
                reason = os.strerror(error.errno) if error.errno else str(error)
                raise TransportError(
                    f"cannot listen on port {self._port} of 127.0.0.1 ({reason}): choose another port, or none to get "
                    "a free one"
                ) from error
        self._process = await asyncio.create_subprocess_exec(
            *arguments, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        try:
            async with asyncio.timeout(_START_TIMEOUT):
                response = await self._read_response(self._process)
        except TimeoutError:
            raise TransportError(f"the embedded broker did not start within {_START_TIMEOUT:g} s") from None
        if "error" in response:
            raise TransportError(f"the embedded broker did not start: {response['error']}")
        self._address = response["bootstrap_servers"]
        if self._server is not None:
            await self._server.start_serving()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Either end may close at any time; that ends the connection and is not an error.
        with contextlib.closing(writer), contextlib.suppress(OSError):
            host, port = self._address.split(":")
            broker_reader, broker_writer = await asyncio.open_connection(host, int(port), limit=_CHUNK)
            await asyncio.gather(_copy(reader, broker_writer), _copy(broker_reader, writer))

    async def _end(self) -> None:
        if self._server is not None:
            self._server.close()
        process = self._process
        if process is None:
            return
        try:
            if process.stdin is not None:
                process.stdin.close()
            async with asyncio.timeout(_END_TIMEOUT):
                await process.wait()
        except TimeoutError:
            logger.warning("the embedded broker did not end within %g s and is killed", _END_TIMEOUT)
        finally:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                process.kill()

    @property
    def bootstrap_servers(self) -> str:
        """The address, `127.0.0.1:port`.

        Raises:
            StateError: The broker was not started.
        """
        self._running()
        return self._address if self._port is None else f"127.0.0.1:{self._port}"

    @property
    def settings(self) -> dict[str, Any]:
        """Settings for an app on this broker: its address, and membership timeouts that suit it.

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
        return f"the embedded broker ended by itself ({await self._ending(self._running())})"

    def _running(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise StateError("the embedded broker was not started: use `async with EmbeddedBroker() as broker:`")
        return self._process

    async def _ending(self, process: asyncio.subprocess.Process) -> str:
        code = await process.wait()
        return f"exit code {code}" if code >= 0 else signal_name(-code)

    # Topics ---------------------------------------------------------------------------

    async def create_topic(self, name: str, partitions: int = DEFAULT_PARTITIONS) -> None:
        """Create a topic. A topic created on first use has `DEFAULT_PARTITIONS`.

        Raises:
            TransportError: The topic exists, its name or number of partitions is invalid, or the broker is gone.
        """
        if not TOPIC_NAME.fullmatch(name):
            raise TransportError(f"{name!r} is not a valid topic name: use 1 to 249 of a-z, A-Z, 0-9, '.', '_' and '-'")
        if partitions < 1:
            raise TransportError(f"topic {name!r} cannot have {partitions} partitions: use at least 1")
        # Not cancelled with the caller: the next command would read this response.
        response = await asyncio.shield(self._send_command({"create_topic": name, "partitions": partitions}))
        if "error" in response:
            raise TransportError(f"the embedded broker refused: {response['error']}")

    # Talking to the process -----------------------------------------------------------

    async def _send_command(self, command: dict[str, Any]) -> dict[str, Any]:
        process = self._running()
        async with self._command_lock:
            assert process.stdin is not None  # noqa: S101 - opened as a pipe
            process.stdin.write(f"{json.dumps(command)}\n".encode())
            return await self._read_response(process)

    async def _read_response(self, process: asyncio.subprocess.Process) -> dict[str, Any]:
        assert process.stdout is not None  # noqa: S101 - opened as a pipe
        if line := await process.stdout.readline():
            return dict(json.loads(line))
        return {"error": f"its process ended ({await self._ending(process)})"}


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.closing(writer):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()


def _library() -> str:
    """Return the path of a shared library with librdkafka's functions.

    Raises:
        MissingExtraError: confluent-kafka is not installed.
    """
    spec = importlib.util.find_spec("confluent_kafka")
    if spec is None or spec.origin is None:
        raise MissingExtraError("the embedded broker", "broker")
    package = Path(spec.origin).parent
    found = [
        *package.with_name("confluent_kafka.libs").glob("librdkafka*"),  # Linux and Windows
        *(package / ".dylibs").glob("librdkafka*"),  # macOS
        # Built from source: looking up a function in the extension module also searches the libraries it links to.
        *package.glob("cimpl*.so"),
    ]
    if not found:
        raise TransportError(f"confluent-kafka in {package} does not contain librdkafka: install its wheel")
    return str(found[0])
