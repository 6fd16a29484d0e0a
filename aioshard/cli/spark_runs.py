"""`aioshard spark drain|follow|status|stop`: a planned run."""

import asyncio
import contextlib
import functools
import json
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import click

from aioshard.cli import options
from aioshard.cli.exit_codes import INTERRUPTED
from aioshard.cli.progress import Progress
from aioshard.cli.spark_session import session
from aioshard.spark.draining.drain import Progress as DrainProgress
from aioshard.spark.draining.drain import drain as drain_run
from aioshard.spark.draining.drain import follow as follow_run
from aioshard.spark.draining.drain import status as status_of
from aioshard.spark.draining.drain import stop as stop_run
from aioshard.spark.draining.drain import until_stopped
from aioshard.spark.runs.directory import RunDirectory

__all__ = ["drain", "follow", "status", "stop"]


@click.command()
@options.run_directory
@options.master
@options.app_dir
@options.as_json("how it ended")
def drain(directory: str, *, master: str, app_dir: str, as_json: bool) -> None:
    """Run the handlers over what is left of the run in DIR.

    The first SIGINT or SIGTERM ends it at the next border of a micro-batch, a second one at once. However it ends, the
    same command goes on at the last border. A record whose handler halts ends it with exit code 3, and is named.
    """
    place = RunDirectory(directory)
    plan = place.plan()
    with session(master, app_dir) as spark:
        report = asyncio.run(_shown(place, plan.records, functools.partial(drain_run, spark, place, tell=_tell)))
    if as_json:
        click.echo(json.dumps(report.asdict()))
        return
    rows = ", ".join(f"{count:,} {name.replace('_', '-')}" for name, count in report.statuses.items()) or "no rows"
    click.echo(f"{report.state}: {report.done:,} of {report.records:,} offsets in {report.batches} batch(es), {rows}")
    if report.state == "finished":
        click.echo(f"Next: aioshard spark verify {directory}")
    else:
        click.echo(f"To go on: aioshard spark drain {directory}")


def _tell(sentence: str) -> None:
    click.echo(sentence, err=True)


async def _shown(place: RunDirectory, total: int, work: Callable[..., Any]) -> Any:
    """Do *work* in a thread, and show how far it is."""
    latest = DrainProgress(done=0, total=total, batch=0, tasks_done=0, tasks=0, seconds=0.0)

    def note(progress: DrainProgress) -> None:
        nonlocal latest
        latest = progress

    def said() -> str:
        left = _left(latest)
        tasks = f"task {latest.tasks_done}/{latest.tasks} of this batch" if latest.tasks else ""
        return ", ".join(text for text in (tasks, left) if text)

    with _ends_at_a_border(place):
        async with Progress("draining", lambda: _estimate(latest), total=total, note=said):
            return await asyncio.to_thread(work, progress=note)


def _estimate(progress: DrainProgress) -> int:
    """Offsets that are done, those of the batch that runs counted by its tasks."""
    share = progress.tasks_done / progress.tasks if progress.tasks else 0.0
    return progress.done + int(progress.batch * share)


def _left(progress: DrainProgress) -> str:
    done = _estimate(progress)
    if not done or done >= progress.total:
        return ""
    seconds = progress.seconds * (progress.total - done) / done
    return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {seconds:.0f} s left"  # noqa: PLR2004 - a minute and a half


@contextlib.contextmanager
def _ends_at_a_border(place: RunDirectory) -> Iterator[None]:
    """The first signal asks for the end at a border, the second ends the process."""
    asked = False

    def on_signal(*_: object) -> None:
        nonlocal asked
        if asked:
            os._exit(INTERRUPTED)
        asked = True
        stop_run(place)
        click.echo("It ends at the next border of a micro-batch; a second signal ends it at once.", err=True)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@click.command()
@options.run_directory
@options.master
@click.option("--trigger", default="10 seconds", show_default=True, help="How often a micro-batch begins.")
@options.app_dir
def follow(directory: str, *, master: str, trigger: str, app_dir: str) -> None:
    """Run the handlers from the planned starts on, without an end.

    Whatever comes is taken, until it is stopped. The first SIGINT or SIGTERM, or `aioshard spark stop DIR`, ends it
    at the next border of a micro-batch.
    """
    place = RunDirectory(directory)
    place.plan()
    with session(master, app_dir) as spark, _ends_at_a_border(place):
        until_stopped(follow_run(spark, place, trigger=trigger, tell=_tell), place)
    click.echo(f"To go on: aioshard spark follow {directory}")


@click.command()
@options.run_directory
@options.as_json("how far it is")
def status(directory: str, *, as_json: bool) -> None:
    """Show how far the run in DIR is; from its files alone."""
    found = status_of(directory)
    if as_json:
        click.echo(json.dumps(found))
        return
    share = 100 * found["done"] // max(found["records"], 1)
    click.echo(f"{found['app']} in place of {found['group']!r}: {found['done']:,} of {found['records']:,} ({share} %)")
    for name, count in found["statuses"].items():
        click.echo(f"  {name.replace('_', '-')}: {count:,}")
    for one in found["halted"]:
        click.echo(f"  halted: {one['topic']}/{one['partition']}/{one['offset']}: {one['error_type']}: {one['error']}")
    if found["stopping"]:
        click.echo("  it was asked to stop at the next border")
    verified = found["verified"]
    if verified is not None:
        click.echo(f"  verified: {'yes' if verified.get('ok') else 'no'}")
    if found["handed_over"] is not None:
        click.echo("  handed over")


@click.command()
@options.run_directory
def stop(directory: str) -> None:
    """Ask the run in DIR to end at the next border of a micro-batch."""
    stop_run(directory)
    click.echo("Asked: it ends at the next border of a micro-batch.")
