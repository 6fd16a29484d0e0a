"""Reading stacks from other threads is safe in an interpreter that collects garbage wherever it allocates: 3.11's."""

import gc
import subprocess
import sys

import pytest

from aioshard.engine.insight.stack import stack_of


def run(*arguments: str) -> int:
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.support.reading_stacks", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-3000:]}"
    return int(done.stdout)


def test_stacks_are_read_while_garbage_is_collected() -> None:
    assert run("read", "8") > 100


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_who_is_forked_while_a_stack_is_read_reads_and_collects_too() -> None:
    run("fork", "300")


async def test_who_has_switched_the_collector_off_keeps_it_off() -> None:
    gc.disable()
    try:
        stack_of(None)
        assert not gc.isenabled()
    finally:
        gc.enable()
    stack_of(None)
    assert gc.isenabled()
