"""The process behind the embedded broker: librdkafka's mock cluster, called through ctypes.

`aioshard.kafka.embedded` runs it as a script and never imports it, because a failed assertion in the C code kills the
process. It exchanges JSON, one object per line:

* first it writes `{"bootstrap_servers": "127.0.0.1:…", "librdkafka": "2.16.0", "missing": []}`, or it writes
  `{"error": "…"}` and exits;
* each line it reads is a command, `{"create_topic": "orders", "partitions": 8}`; it answers `{}` or
  `{"error": "…"}`, in order;
* it exits at the end of its standard input, so it never outlives its parent process.
"""

import ctypes
import json
import os
import signal
import sys
from typing import Any

__all__ = ["MockCluster", "main"]

_NEEDED = ("rd_kafka_conf_new", "rd_kafka_new", "rd_kafka_mock_cluster_new", "rd_kafka_mock_cluster_bootstraps")
_BROKER_ID = 1
_PRODUCER = 0
_ERROR_SIZE = 512

_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "rd_kafka_version_str": (ctypes.c_char_p, []),
    "rd_kafka_err2str": (ctypes.c_char_p, [ctypes.c_int]),
    "rd_kafka_conf_new": (ctypes.c_void_p, []),
    "rd_kafka_conf_set": (
        ctypes.c_int,
        [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t],
    ),
    "rd_kafka_new": (ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]),
    "rd_kafka_mock_cluster_new": (ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_int]),
    "rd_kafka_mock_cluster_bootstraps": (ctypes.c_char_p, [ctypes.c_void_p]),
    "rd_kafka_mock_topic_create": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_int]),
    "rd_kafka_mock_group_initial_rebalance_delay_ms": (None, [ctypes.c_void_p, ctypes.c_int32]),
    "rd_kafka_mock_broker_set_host_port": (
        ctypes.c_int,
        [ctypes.c_void_p, ctypes.c_int32, ctypes.c_char_p, ctypes.c_int],
    ),
}
"""Result and argument types of the functions we call. The mock is experimental and its functions come and go with
versions, so we look up each one before the call."""


class MockCluster:
    """A mock cluster of one broker in this process; lives until the process ends."""

    def __init__(self, library: str, advertised_port: int | None) -> None:
        """Start the broker.

        Args:
            library: Path of a shared library that offers librdkafka's functions.
            advertised_port: The port on 127.0.0.1 that clients see; None means the broker's own port.

        Raises:
            OSError: The library cannot be loaded, or lacks a required function.
        """
        self._library = ctypes.CDLL(library)
        self.missing = tuple(name for name in _SIGNATURES if not self._declare(name))
        """Functions that this version of librdkafka does not have."""
        lacking = [name for name in _NEEDED if name in self.missing]
        if lacking:
            raise OSError(f"librdkafka in {library} has no mock cluster: {', '.join(lacking)} not found")
        error = ctypes.create_string_buffer(_ERROR_SIZE)
        configuration = self._library.rd_kafka_conf_new()
        if "rd_kafka_conf_set" not in self.missing:
            # Warnings and above: the default level also logs that no brokers are configured.
            self._library.rd_kafka_conf_set(configuration, b"log_level", b"4", error, _ERROR_SIZE)
        handle = self._library.rd_kafka_new(_PRODUCER, configuration, error, _ERROR_SIZE)
        self._cluster = self._library.rd_kafka_mock_cluster_new(handle, 1) if handle else None
        if not self._cluster:
            raise OSError(f"librdkafka did not start a mock cluster: {error.value.decode() or 'it says no reason'}")
        if "rd_kafka_mock_group_initial_rebalance_delay_ms" not in self.missing:
            self._library.rd_kafka_mock_group_initial_rebalance_delay_ms(self._cluster, 0)
        if advertised_port is not None:
            self._advertise(advertised_port)

    def _declare(self, name: str) -> bool:
        function = getattr(self._library, name, None)
        if function is None:
            return False
        function.restype, function.argtypes = _SIGNATURES[name]
        return True

    def _advertise(self, port: int) -> None:
        if "rd_kafka_mock_broker_set_host_port" in self.missing:
            raise OSError("this version of librdkafka cannot advertise a chosen port: leave the port out")
        self._library.rd_kafka_mock_broker_set_host_port(self._cluster, _BROKER_ID, b"127.0.0.1", port)

    @property
    def bootstrap_servers(self) -> str:
        """The address that the broker itself listens on."""
        servers: bytes = self._library.rd_kafka_mock_cluster_bootstraps(self._cluster)
        return servers.decode()

    @property
    def version(self) -> str:
        """The version of librdkafka."""
        return "unknown" if "rd_kafka_version_str" in self.missing else self._library.rd_kafka_version_str().decode()

    def create_topic(self, name: str, partitions: int) -> None:
        """Create a topic.

        Raises:
            OSError: The topic exists, or this version cannot create topics.
        """
        if "rd_kafka_mock_topic_create" in self.missing:
            raise OSError(
                "this version of librdkafka cannot create topics: use the topic without creating it, "
                "and it will have 4 partitions"
            )
        code = self._library.rd_kafka_mock_topic_create(self._cluster, name.encode(), partitions, 1)
        if code:
            told = str(code) if "rd_kafka_err2str" in self.missing else self._library.rd_kafka_err2str(code).decode()
            raise OSError(f"topic {name!r} was not created: {told}")


def main(library: str, advertised_port: int | None) -> int:
    """Run a broker until standard input ends.

    Args:
        library: As for `MockCluster`.
        advertised_port: As for `MockCluster`.

    Returns:
        The exit code: 0, or 1 if the broker did not start.
    """
    # Ctrl-C in the terminal reaches the whole process group; our parent decides when we exit.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        cluster = MockCluster(library, advertised_port)
    except OSError as error:
        _say({"error": str(error)})
        return 1
    _say({"bootstrap_servers": cluster.bootstrap_servers, "librdkafka": cluster.version, "missing": cluster.missing})
    for line in sys.stdin:
        _say(_answer(cluster, json.loads(line)))
    return 0


def _answer(cluster: MockCluster, command: dict[str, Any]) -> dict[str, Any]:
    try:
        cluster.create_topic(command["create_topic"], command["partitions"])
    except OSError as error:
        return {"error": str(error)}
    return {}


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)  # noqa: T201 - the parent process reads it


if __name__ == "__main__":
    # The C library's threads have nothing to finish; waiting for them could hang.
    code = main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else None)  # noqa: PLR2004
    sys.stdout.flush()
    os._exit(code)
