"""The process behind the embedded broker: librdkafka's mock cluster, called through ctypes.

`aioshard.kafka.embedded` runs it as a script and never imports it, because a failed assertion in the C code kills the
process. It exchanges JSON, one object per line:

* first it writes `{"bootstrap_servers": "127.0.0.1:…"}`, or it writes `{"error": "…"}` and exits;
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

_BROKER_ID = 1
_PRODUCER = 0
_ERROR_SIZE = 512

_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
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
"""Result and argument types of the functions we call."""


class MockCluster:
    """A mock cluster of one broker in this process; lives until the process ends."""

    def __init__(self, path: str, advertised_port: int | None) -> None:
        """Start the broker.

        Args:
            path: Path of a shared library that offers librdkafka's functions.
            advertised_port: The port on 127.0.0.1 that clients see; None means the broker's own port.

        Raises:
            OSError: The library cannot be loaded, or the broker did not start.
            AttributeError: The library lacks a function.
        """
        self._library = library = ctypes.CDLL(path)
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        error = ctypes.create_string_buffer(_ERROR_SIZE)
        configuration = library.rd_kafka_conf_new()
        # Warnings and above: the default level also logs that no brokers are configured.
        library.rd_kafka_conf_set(configuration, b"log_level", b"4", error, _ERROR_SIZE)
        handle = library.rd_kafka_new(_PRODUCER, configuration, error, _ERROR_SIZE)
        self._cluster = library.rd_kafka_mock_cluster_new(handle, 1) if handle else None
        if not self._cluster:
            raise OSError(f"librdkafka did not start a mock cluster: {error.value.decode() or 'no reason given'}")
        library.rd_kafka_mock_group_initial_rebalance_delay_ms(self._cluster, 0)
        if advertised_port is not None:
            library.rd_kafka_mock_broker_set_host_port(self._cluster, _BROKER_ID, b"127.0.0.1", advertised_port)
        self.bootstrap_servers: str = library.rd_kafka_mock_cluster_bootstraps(self._cluster).decode()
        """The address that the broker itself listens on."""

    def create_topic(self, name: str, partitions: int) -> dict[str, str]:
        """Create a topic; return the response to the command."""
        code = self._library.rd_kafka_mock_topic_create(self._cluster, name.encode(), partitions, 1)
        if not code:
            return {}
        return {"error": f"topic {name!r} was not created: {self._library.rd_kafka_err2str(code).decode()}"}


def main(path: str, advertised_port: int | None) -> int:
    """Run a broker until standard input ends; return the exit code: 0, or 1 if the broker did not start."""
    # Ctrl-C in the terminal reaches the whole process group; our parent decides when we exit.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        cluster = MockCluster(path, advertised_port)
    except (OSError, AttributeError) as error:
        _write({"error": str(error)})
        return 1
    _write({"bootstrap_servers": cluster.bootstrap_servers})
    for line in sys.stdin:
        command = json.loads(line)
        _write(cluster.create_topic(command["create_topic"], command["partitions"]))
    return 0


def _write(response: dict[str, str]) -> None:
    print(json.dumps(response), flush=True)  # noqa: T201 - the parent process reads it


if __name__ == "__main__":
    # The C library's threads have nothing to finish; waiting for them could hang.
    code = main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else None)  # noqa: PLR2004
    sys.stdout.flush()
    os._exit(code)
