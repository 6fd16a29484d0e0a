"""Reading how much CPU an event loop's thread gets."""

import sys
import threading
import time
from pathlib import Path

import pytest

from aioshard.engine.loop_figures import LoopMeter, find_cpu_stat

STAT = "nr_periods 27\nnr_throttled {}\nthrottled_usec 1545329\n"


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, "ascii")


@pytest.mark.parametrize(
    ("groups", "file"),
    [
        ("0::/app\n", "app/cpu.stat"),
        ("0::/\n", "cpu.stat"),
        ("0::/kubepods/pod7/a\n", "cpu.stat"),
        ("5:memory:/a\n4:cpu,cpuacct:/docker/a\n0::/\n", "cpu,cpuacct/docker/a/cpu.stat"),
        ("4:cpu,cpuacct:/docker/a\n", "cpu,cpuacct/cpu.stat"),
    ],
    ids=["version 2", "version 2 in a container", "path of the host", "version 1", "version 1, path of the host"],
)
def test_the_figures_of_the_control_group_are_found(tmp_path: Path, groups: str, file: str) -> None:
    write(tmp_path / "proc/cgroup", groups)
    write(tmp_path / "groups" / file, STAT.format(24))
    assert find_cpu_stat(tmp_path / "proc", tmp_path / "groups") == tmp_path / "groups" / file


@pytest.mark.parametrize("groups", [None, "", "nonsense\n", "0::/app\n"], ids=["no file", "empty", "odd", "no limit"])
def test_without_a_limit_there_are_no_figures_of_a_control_group(tmp_path: Path, groups: str | None) -> None:
    if groups is not None:
        write(tmp_path / "proc/cgroup", groups)
    write(tmp_path / "groups/app/cpu.stat", "usage_usec 5\n")
    assert find_cpu_stat(tmp_path / "proc", tmp_path / "groups") is None


@pytest.mark.skipif(sys.platform != "linux", reason="other systems provide less")
def test_another_thread_reads_how_much_a_thread_computes() -> None:
    meter = LoopMeter()
    readings = []

    def read() -> None:
        end = time.monotonic() + 20.0
        while meter.is_ready() and time.monotonic() < end:
            pass  # it does not wait for this thread yet
        readings.append((meter.read(), meter.is_ready()))

    def read_in_a_thread() -> None:
        reader = threading.Thread(target=read)
        reader.start()
        reader.join()

    read_in_a_thread()
    end = time.thread_time() + 0.2
    while time.thread_time() < end:
        pass
    read_in_a_thread()

    (before, waits), (after, _) = readings
    assert waits is False, "it waits for the reader"
    assert before.cpu is not None
    assert after.cpu is not None
    assert after.cpu - before.cpu >= 0.2
    assert after.process_cpu - before.process_cpu >= 0.2
    own = meter.read()
    assert own.cpu is not None
    assert own.cpu >= after.cpu
