"""A process ends although a call of the client hangs."""

import subprocess
import sys

import pytest

from aioshard.kafka.confluent.threads import DaemonThreads

HANGS = """
import threading
from aioshard.kafka.confluent.threads import DaemonThreads
threads = DaemonThreads(2, "hangs")
threads.submit(threading.Event().wait)
print(threads.submit(sum, [1, 2]).result())
threads.shutdown()
"""


def test_a_call_that_hangs_does_not_keep_the_process() -> None:
    ended = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=30, check=True)

    assert ended.stdout == "3\n"


def test_what_a_call_raises_is_raised_where_it_is_waited_for() -> None:
    threads = DaemonThreads(1, "fails")
    try:
        with pytest.raises(ValueError, match="invalid literal"):
            threads.submit(int, "x").result()
    finally:
        threads.shutdown()
