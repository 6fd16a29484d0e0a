"""Ports of 127.0.0.1 for servers that a test run starts."""

import os
import random
import socket
from pathlib import Path

from tests.support.paths import RUN_DIRECTORY

# Below the range that the kernel gives to outgoing connections: a client that tries again and again to
# reach a stopped broker on a port of that range may end up connected to itself, and then holds the port.
PORTS = range(16_000, 32_000)


def free_port() -> int:
    """Return a port as `free_ports` does."""
    (port,) = free_ports(1)
    return port


def free_ports(count: int) -> list[int]:
    """Return ports on which nobody listens; no process of the test run gets one of them again.

    So a server that is started later, or is stopped for a while, finds its port free.
    """
    found: list[int] = []
    while len(found) < count:
        port = random.choice(PORTS)
        if port not in found and _is_free(port) and _claim(port):
            found.append(port)
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _claim(port: int) -> bool:
    """Make a port ours for the rest of the run; outside of a run nothing needs to be claimed."""
    if RUN_DIRECTORY not in os.environ:
        return True
    try:
        Path(os.environ[RUN_DIRECTORY], f"port-{port}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
