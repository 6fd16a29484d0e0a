"""What the process itself suffers from, and what of that a restart cures, in sentences."""

from collections.abc import Iterator

from aioshard.engine.insight.head import for_seconds
from aioshard.engine.runtime import Engine
from aioshard.observe import Finding

__all__ = ["of_the_process", "ready_anyway", "restart_cures"]

_TURNS_WITHIN = 3.0
"""Seconds without a look after which the event loop is said to stand still where nobody watches it otherwise."""


def restart_cures(engine: Engine, now: float) -> Iterator[str]:
    """Why a restart would help; nothing when it would not. Safe from any thread.

    What stands still because of its data, or because brokers are away, is not among it: after a restart it would
    stand still again.

    Args:
        engine: The engine.
        now: Loop time.
    """
    watch, limit = engine.loop_watch, engine.settings.session_timeout
    if watch is not None and watch.standing() > limit and (blocked := watch.blocked()) is not None:
        yield f"{blocked}; that is longer than session_timeout={limit:g} s"
    if engine.state == "failed":
        yield _failed(engine)
    if engine.state not in ("starting", "running"):
        return
    hangs = engine.liveness.watch.sentence(now)
    if hangs is not None:
        yield hangs
    for worker in engine.liveness.overdue():
        for delivery in tuple(worker.deliveries)[:1]:
            yield (
                f"record {delivery!r} has been running{for_seconds(now - worker.started)}, longer than "
                f"stuck_after={engine.settings.stuck_after:g} s, and restart_when_stuck is set"
            )


def ready_anyway(engine: Engine, now: float) -> bool:
    """Whether `ready_timeout` has passed before the first join; safe from any thread."""
    timeout = engine.settings.ready_timeout
    return engine.state == "starting" and timeout is not None and now - engine.started_at >= timeout


def of_the_process(engine: Engine, now: float) -> Iterator[Finding]:
    """What the process itself suffers from, whatever its brokers and records do; safe from any thread."""
    blocked = _blocked(engine, now)
    if blocked is not None:
        advice = "compute or block in a thread, with a plain 'def' handler or asyncio.to_thread"
        yield Finding("event loop", f"{blocked}; nothing else runs meanwhile", None, advice)
    if engine.state == "failed":
        yield Finding("failed", _failed(engine), None, "mend what that says; a restart of the process starts anew")
    hangs = engine.liveness.watch.sentence(now)
    if hangs is not None:
        yield Finding("hung", hangs, None, "a restart of the process cures it, and /livez asks for one")


def _blocked(engine: Engine, now: float) -> str | None:
    watch, looked = engine.loop_watch, engine.since.looked_at
    if watch is not None:
        return watch.blocked()
    if looked is None or now - looked <= _TURNS_WITHIN:
        return None
    return f"the event loop has not turned for {now - looked:.1f} s: something computes or blocks without an await"


def _failed(engine: Engine) -> str:
    error = engine.failed.exception() if engine.failed.done() else None
    return f"the app has failed: {error or 'the log says why'}"
