"""Why an event loop is blocked, decided from figures."""

import dataclasses

import pytest

from aioshard.core.loop_block import ExecutedCode, Look, LoopBlock, LoopFigures, judge

SWITCH_INTERVAL = 0.005
HANDLER = ExecutedCode(
    handler="on_order",
    worker="on_order-1",
    task="on_order-1",
    records="record orders/2/7",
    entry="worker.py in run",
    place="/app/billing.py:31 in on_order",
    called="time.sleep",
    own=True,
)
OTHER = dataclasses.replace(HANDLER, worker="on_order-2", task="on_order-2", records="record orders/1/0")
WAITS = Look(HANDLER, is_ready=False, cpu=1.0)
BEFORE = LoopFigures(at=100.0, cpu=1.0, no_cpu=2.0, starts=1_000, watcher_no_cpu=1.5, process_cpu=5.0, throttles=3)


def block_of(
    *looks: Look,
    seconds: float = 3.0,
    cpu: float | None = 0.0,
    no_cpu: float | None = 0.0,
    starts: int | None = 0,
    watcher_no_cpu: float | None = 0.0,
    others: float = 0.0,
    unwatched: float = 0.0,
    throttles: int | None = 0,
) -> LoopBlock:
    """Judge a loop that has not ticked for *seconds*, by how much each figure grew; None is unknown."""
    now = LoopFigures(
        at=BEFORE.at + seconds,
        cpu=None if cpu is None or BEFORE.cpu is None else BEFORE.cpu + cpu,
        no_cpu=None if no_cpu is None or BEFORE.no_cpu is None else BEFORE.no_cpu + no_cpu,
        starts=None if starts is None or BEFORE.starts is None else BEFORE.starts + starts,
        watcher_no_cpu=(
            None if watcher_no_cpu is None or BEFORE.watcher_no_cpu is None else BEFORE.watcher_no_cpu + watcher_no_cpu
        ),
        process_cpu=BEFORE.process_cpu + (cpu or 0.0) + others,
        throttles=None if throttles is None or BEFORE.throttles is None else BEFORE.throttles + throttles,
    )
    return judge(BEFORE, now, looks, unwatched=unwatched, switch_interval=SWITCH_INTERVAL)


# Code


def test_code_that_waits_in_a_call_is_named() -> None:
    block = block_of(WAITS, WAITS)
    assert (block.cause, block.code) == ("waits", HANDLER)
    assert "handler on_order blocks without an await, with record orders/2/7" in str(block)
    assert "at /app/billing.py:31 in on_order in time.sleep" in str(block)


def test_code_that_computes_is_named_with_the_line_of_the_last_look() -> None:
    before = dataclasses.replace(HANDLER, place="/app/billing.py:30 in on_order")
    block = block_of(Look(before, is_ready=True, cpu=1.9), Look(HANDLER, is_ready=True, cpu=2.0), cpu=2.8)
    assert (block.cause, block.code) == ("computes", HANDLER)
    assert block.cpu_seconds == pytest.approx(2.8)


def test_code_that_computes_for_a_second_is_named_however_busy_the_machine_is() -> None:
    block = block_of(WAITS, WAITS, seconds=10.0, cpu=1.1, no_cpu=8.5)
    assert (block.cause, block.code) == ("computes", HANDLER)
    assert "no CPU for 8.5 s" in str(block)


@pytest.mark.parametrize("cpu", [0.0, 2.8])
@pytest.mark.parametrize(
    "looks",
    [
        (),
        (WAITS,),
        (WAITS, WAITS._replace(code=OTHER)),
        (WAITS, WAITS._replace(code=None)),
        (WAITS._replace(code=None),),
    ],
    ids=["none", "one", "another record", "idle", "always idle"],
)
def test_code_is_blamed_only_if_two_looks_agree(looks: tuple[Look, ...], cpu: float) -> None:
    block = block_of(*looks, cpu=cpu)
    assert block.code is None
    assert block.cause == ("computes" if cpu else "unknown")
    assert "on_order" not in str(block)


@pytest.mark.parametrize("cpu", [0.0, None])
def test_looks_by_a_thread_that_hardly_ran_blame_no_code(cpu: float | None) -> None:
    assert block_of(WAITS, WAITS, cpu=cpu, no_cpu=cpu, unwatched=2.9).code is None


def test_a_starved_process_whose_other_threads_compute_lacks_the_interpreter_lock() -> None:
    block = block_of(WAITS, WAITS, watcher_no_cpu=1.0, others=2.5, unwatched=2.9)
    assert (block.cause, block.code) == ("interpreter lock", None)


def test_only_the_last_two_looks_have_to_agree() -> None:
    assert block_of(WAITS._replace(code=OTHER), WAITS, WAITS).code == HANDLER


def test_callbacks_agree_if_the_same_function_runs() -> None:
    callback = ExecutedCode(None, None, None, None, "/app/a.py in tick", "/app/a.py:3 in tick", None, own=True)
    moved = dataclasses.replace(callback, place="/app/a.py:4 in tick")
    other = dataclasses.replace(callback, entry="/app/a.py in tock")
    assert block_of(*(WAITS._replace(code=code) for code in (callback, moved))).code == moved
    assert block_of(*(WAITS._replace(code=code) for code in (callback, other))).code is None


def test_library_code_is_not_to_be_moved_to_a_thread() -> None:
    ours = ExecutedCode(
        None, None, "commit coordinator", None, "committer.py in run", "committer.py:1 in run", None, own=False
    )
    blocks = [block_of(WAITS._replace(code=code), WAITS._replace(code=code), cpu=2.0) for code in (HANDLER, ours)]
    assert ["to_thread" in block.what_to_do for block in blocks] == [True, False]


# The machine


def test_a_thread_that_gets_no_cpu_blames_the_machine_alone() -> None:
    block = block_of(WAITS, WAITS, cpu=0.3, no_cpu=2.4)
    assert (block.cause, block.code) == ("no CPU", None)
    assert block.no_cpu_seconds == pytest.approx(2.4)
    assert "the machine gave this process no CPU for 2.4 s" in str(block)
    assert "control group" not in str(block)
    assert "raise the CPU limit" in block.what_to_do


def test_the_limit_of_a_control_group_is_named_if_it_stopped_the_process() -> None:
    block = block_of(no_cpu=2.4, throttles=24)
    assert block.throttles == 24
    assert "the CPU limit of its control group stopped it 24 times" in str(block)


def test_a_thread_that_is_still_ready_to_run_gets_no_cpu() -> None:
    """The system counts that time only when the thread gets a CPU."""
    ready = Look(HANDLER, is_ready=True, cpu=1.0)
    assert block_of(ready, ready).cause == "no CPU"
    assert "is ready to run" in str(block_of(ready, ready))
    assert block_of(WAITS, ready).cause == "waits"
    assert block_of(ready, ready._replace(cpu=1.01)).cause == "waits", "it has run in between"


def test_a_process_that_was_stopped_blames_nobody() -> None:
    block = block_of(WAITS, WAITS, seconds=5.0, unwatched=4.5)
    assert (block.cause, block.code) == ("stopped", None)
    assert block.unwatched_seconds == pytest.approx(4.5)
    assert "to_thread" not in block.what_to_do


def test_a_watching_thread_that_got_no_cpu_either_does_not_count_as_stopped() -> None:
    assert block_of(seconds=5.0, no_cpu=4.2, unwatched=4.5).cause == "no CPU"
    block = block_of(seconds=5.0, no_cpu=0.5, watcher_no_cpu=3.5, unwatched=4.5)
    assert block.cause == "no CPU", "the loop waits for the interpreter lock, whose holder gets no CPU"
    assert block.no_cpu_seconds == pytest.approx(3.5)


def test_a_wait_in_a_starved_process_has_to_be_proven() -> None:
    """It may wait for a thread that holds the interpreter lock and gets no CPU."""
    ready = WAITS._replace(is_ready=True)
    assert block_of(WAITS, WAITS, no_cpu=1.0).cause == "waits"
    assert block_of(WAITS, ready._replace(cpu=1.01), no_cpu=1.0).cause == "no CPU"
    assert block_of(WAITS, WAITS._replace(code=OTHER), no_cpu=1.0).cause == "no CPU"


# The interpreter lock


def test_a_call_that_holds_the_interpreter_lock_computes() -> None:
    block = block_of(cpu=2.9, unwatched=2.8)
    assert (block.cause, block.code) == ("computes", None)


def test_another_thread_that_holds_the_interpreter_lock_is_to_blame() -> None:
    block = block_of(WAITS, WAITS, others=2.9, unwatched=2.8)
    assert (block.cause, block.code) == ("interpreter lock", None)
    assert block.other_cpu_seconds == pytest.approx(2.9)
    assert block_of(seconds=13.0, others=2.0, unwatched=12.1).cause == "interpreter lock", "and got little CPU"
    assert block_of(seconds=13.0, others=0.4, unwatched=12.1).cause == "stopped", "they computed before that"


def test_threads_that_share_the_interpreter_are_told_from_a_call_that_waits_beside_them() -> None:
    assert block_of(WAITS, WAITS, others=2.9, starts=580).cause == "interpreter lock"
    assert block_of(WAITS, WAITS, others=2.9, starts=3).cause == "waits"
    assert block_of(WAITS, WAITS, others=0.1, starts=580).cause == "waits", "a call that waits in a loop"


# Systems that do not provide the figures


def test_nothing_is_asserted_without_figures() -> None:
    block = block_of(WAITS, WAITS, cpu=None, no_cpu=None, starts=None, watcher_no_cpu=None, throttles=None)
    assert (block.cause, block.code) == ("unknown", HANDLER)
    assert (block.cpu_seconds, block.no_cpu_seconds, block.throttles) == (None, None, None)
    assert "handler on_order computes or blocks" in str(block)
    assert "does not say" in str(block)


def test_computing_is_known_without_the_figures_of_the_scheduler() -> None:
    block = block_of(WAITS, WAITS, cpu=2.8, no_cpu=None, starts=None)
    assert (block.cause, block.code) == ("computes", HANDLER)


def test_a_process_that_did_not_run_may_have_lacked_a_cpu_if_the_system_does_not_say() -> None:
    assert block_of(no_cpu=None, starts=None, unwatched=2.9).cause == "unknown"


@pytest.mark.parametrize(
    ("block", "helps"),
    [
        (block_of(WAITS, WAITS), True),
        (block_of(WAITS, WAITS, cpu=2.9), True),
        (block_of(no_cpu=2.9), False),
        (block_of(unwatched=2.9), False),
    ],
    ids=["waits", "computes", "no CPU", "stopped"],
)
def test_a_restart_helps_only_against_code(block: LoopBlock, *, helps: bool) -> None:
    assert block.restart_helps is helps
