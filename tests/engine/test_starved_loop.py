"""An event loop that gets no CPU, or is stopped, is not blamed on a handler; a handler that blocks it still is."""

import asyncio
import contextlib
import signal
import sys

import pytest

from tests.support.starving import Report, a_core, burning, line_of, member, starve

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the time without a CPU"),
]


def names_code(report: Report) -> bool:
    return "without an await" in str(report.get("text"))


def ends_a_block(report: Report) -> bool:
    return str(report.get("event")) == "loop_resumed"


async def test_a_loop_that_gets_no_cpu_blames_the_machine() -> None:
    core = a_core()
    async with member("await", core=core, niceness=19) as starved:
        await starve(starved, core, lambda report: ends_a_block(report) and report["cause"] == "no CPU")
        await starved.end()
    assert not [report for report in starved.reports if names_code(report)]


@pytest.mark.parametrize(("does", "cause"), [("sleep", "waits"), ("compute", "computes")])
@pytest.mark.parametrize("is_busy", [False, True], ids=["idle machine", "busy core"])
async def test_a_handler_that_blocks_the_loop_is_named_on_any_machine(does: str, cause: str, *, is_busy: bool) -> None:
    core = a_core()
    async with (
        burning(core) if is_busy else contextlib.nullcontext(),
        member(does, core=core if is_busy else None) as blocked,
    ):
        await blocked.until(ends_a_block)
        await blocked.end()
    named = [report for report in blocked.reports if report.get("cause") == cause]
    assert {report["kind"] for report in named} == {"log", "explained"}
    naming = [report for report in named if names_code(report)]
    assert naming, named
    assert all("handle" in report["text"] for report in naming)
    assert all(line_of(f"{does}s here").partition(":")[0] in report["text"] for report in naming)
    if does == "sleep":
        assert all(line_of("sleeps here") in report["text"] for report in naming)
    if not is_busy:
        assert naming == named, "only a watch that gets little CPU itself cannot name it each time"


async def test_a_process_that_was_stopped_is_not_blamed_on_code() -> None:
    async with member("await") as frozen:
        frozen.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(4.0)  # that is how long the loop is blocked
        frozen.process.send_signal(signal.SIGCONT)
        report = await frozen.until(ends_a_block)
        await frozen.end()
    assert report["cause"] == "stopped"
    assert not [report for report in frozen.reports if names_code(report)]
