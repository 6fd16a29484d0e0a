"""`aioshard spark`: an app's handlers over history, on Spark."""

import asyncio
import contextlib
import dataclasses
import functools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aioshard.cli import options
from aioshard.cli.exit_codes import INTERRUPTED
from aioshard.cli.groups import InOrder
from aioshard.cli.loading import load_app
from aioshard.cli.moments import moment
from aioshard.cli.progress import Progress
from aioshard.cli.sides import run
from aioshard.cli.tables import print_table
from aioshard.errors import SettingsError
from aioshard.kafka.connecting import silence_client
from aioshard.spark.draining.drain import Progress as DrainProgress
from aioshard.spark.draining.drain import drain as drain_run
from aioshard.spark.draining.drain import follow as follow_run
from aioshard.spark.draining.drain import status as status_of
from aioshard.spark.draining.drain import stop as stop_run
from aioshard.spark.draining.drain import until_stopped
from aioshard.spark.ending.handover import handover as hand_over
from aioshard.spark.ending.letters import letters_owed, send_letters
from aioshard.spark.planning.planning import plan as make_plan
from aioshard.spark.runs.directory import RunDirectory
from aioshard.spark.runs.plan import Plan
from aioshard.spark.session import check_packages, local_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["command", "drain", "follow", "handover", "plan", "redrive", "session", "status", "stop", "verify"]

_SHOWN = 20
"""Partitions in the table."""


@click.command()
@options.target
@click.option("--out", "directory", required=True, metavar="DIR", help="Directory of the run, new.")
@click.option(
    "--start",
    callback=moment("committed", "earliest"),
    default="committed",
    show_default=True,
    metavar="committed|earliest|TIME|FILE",
    help="Where to begin: where the group is, the oldest record, the first one not older than a time, or offsets.",
)
@click.option(
    "--end",
    callback=moment("latest"),
    default="latest",
    show_default=True,
    metavar="latest|TIME|FILE",
    help="Where to end, frozen now.",
)
@click.option("--group", help="Whose place the run takes, instead of the app's group.")
@click.option("--tasks", type=click.IntRange(1), help="Tasks of a micro-batch at most.")
@click.option(
    "--max-rows-per-batch",
    type=click.IntRange(1),
    default=500_000,
    show_default=True,
    help="Records of a micro-batch: what a crash can repeat.",
)
@click.option(
    "--total-concurrency", type=click.IntRange(1), help="Handlers that run at the same time in the whole job."
)
@click.option("--on-failure", metavar="skip|dead-letter:TOPIC", help="Instead of the handlers' own policies.")
@click.option("--shuffle", is_flag=True, help="Bring the records of a key together across partitions and topics.")
@click.option("--lease", type=click.FloatRange(0), metavar="SECONDS", help="Have apps of the group keep off so long.")
@options.bootstrap_servers("the app's setting")
@options.app_dir
@options.as_json("the plan")
def plan(
    target: str,
    *,
    directory: str,
    app_dir: str,
    as_json: bool,
    **chosen: Any,
) -> None:
    """Plan a run of MODULE:APP over history, in a new DIR.

    Start, end, settings and the app's version are frozen with it: a drain does what its plan says.
    """
    load_app(target, app_dir)
    told: list[str] = []
    made = run(make_plan(target, directory=directory, tell=told.append, **chosen))
    for sentence in told:
        click.echo(sentence, err=True)
    if as_json:
        click.echo(json.dumps(json.loads(made.to_json()), indent=2))
        return
    _show(made)
    click.echo(f"\nNext: aioshard spark drain {directory}")


def _show(made: Plan) -> None:
    left = [one for one in made.ranges if one.end > one.start]
    click.echo(f"{made.records:,} offset(s) of {len(left)} partition(s) for {made.app}, in place of {made.group_id!r}")
    for handler in made.handlers:
        policy = made.on_failure or handler.on_failure
        click.echo(f"  {handler.name}: {', '.join(handler.topics)}; order by {handler.shard_by}; on failure {policy}")
    if left:
        click.echo()
        rows = [
            (one.topic, str(one.partition), str(one.start), str(one.end), f"{one.end - one.start:,}") for one in left
        ]
        print_table(("topic", "partition", "start", "end", "offsets"), rows[:_SHOWN])
        if len(rows) > _SHOWN:
            click.echo(f"and {len(rows) - _SHOWN} more partition(s)")


@contextlib.contextmanager
def session(master: str, app_dir: str) -> "Iterator[SparkSession]":
    """A session in which the app's module is found; it is stopped at the end.

    A signal that comes before it stands ends the command as soon as it does.
    """
    sys.path.insert(0, str(Path(app_dir).resolve()))
    check_packages()
    with _interrupted_when_it_stands() as asked:
        try:
            spark = local_session(master)
        except SettingsError:
            if asked:  # a terminal sends it to every process that is part of the start
                raise KeyboardInterrupt from None
            raise
    try:
        if asked:
            raise KeyboardInterrupt
        yield spark
    finally:
        spark.stop()


@contextlib.contextmanager
def _interrupted_when_it_stands() -> "Iterator[list[int]]":
    """Collect the signals that come meanwhile; the second one ends the process.

    An exception here would remove the file that Spark's Java writes when it is ready: it would stay, and keep the
    command's output open. When the process ends instead, Java reads the end of its input and ends too.
    """
    asked: list[int] = []

    def on_signal(number: int, _: object) -> None:
        if asked:
            os._exit(INTERRUPTED)
        asked.append(number)
        click.echo("Spark is starting: it ends when Spark stands; a second signal ends it at once.", err=True)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_NOT_VERIFIED = 3


@click.command()
@options.run_directory
@options.master
@options.app_dir
@options.as_json("what was found")
def verify(directory: str, *, master: str, app_dir: str, as_json: bool) -> int:
    """Find out whether each record of a run has exactly one outcome.

    Exits with 3 when not, and says which.
    """
    from aioshard.spark.ending.verify import verify as verify_run  # noqa: PLC0415 - pyspark is imported on use

    place = RunDirectory(directory)
    place.plan()
    with session(master, app_dir) as spark:
        found = verify_run(spark, place)
    if as_json:
        click.echo(json.dumps(found.asdict()))
    else:
        for problem in found.problems:
            click.echo(problem)
        click.echo(f"{'verified' if found.ok else 'not verified'}: {found.records:,} record(s)")
        if found.ok:
            click.echo(f"Next: aioshard spark handover {directory}")
    return 0 if found.ok else _NOT_VERIFIED


@click.command()
@options.run_directory
@click.option(
    "--wait",
    type=click.FloatRange(0),
    metavar="SECONDS",
    help="Wait so long for members that were killed, or are static, to expire; the session time-out by default.",
)
@click.option("--dry-run", is_flag=True, help="Check what can be checked without a commit.")
@click.option("--force", is_flag=True, help="Also when the group has moved since the plan was made.")
@options.master
@options.app_dir
@options.as_json("what was done")
def handover(
    directory: str, *, wait: float | None, dry_run: bool, force: bool, master: str, app_dir: str, as_json: bool
) -> None:
    """Commit the ends of the verified run in DIR to its group.

    The live app then goes on exactly there. Dead letters of the run are sent first; only for them it starts Spark.
    Refused, and no offset changed, with exit code 4 when the group has members or has moved.
    """
    sys.path.insert(0, str(Path(app_dir).resolve()))
    place = RunDirectory(directory)
    if letters_owed(place) and not dry_run:
        silence_client()
        with session(master, app_dir) as spark:
            send_letters(spark, place, lambda text: click.echo(text, err=True))
    done = run(
        hand_over(directory, wait=wait, dry_run=dry_run, force=force, tell=lambda text: click.echo(text, err=True))
    )
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(done)))
        return
    click.echo(f"{done.state}: group {done.group_id!r}")
    rows = [
        (topic, str(partition), _offset(done.before.get(topic, {}).get(partition)), _offset(offset))
        for topic, offsets in sorted(done.offsets.items())
        for partition, offset in sorted(offsets.items())
    ]
    print_table(("topic", "partition", "before", "now"), rows)
    for name in done.new_partitions:
        click.echo(f"{name} is new since the plan: the live app reads it from its start")


def _offset(offset: int | None) -> str:
    return "-" if offset is None else str(offset)


@click.command()
@options.run_directory
@click.option("--out", required=True, metavar="OUT", help="New directory of the rows, as Parquet.")
@click.option(
    "--status",
    "statuses",
    type=click.Choice(["dead_lettered", "skipped"]),
    multiple=True,
    default=("dead_lettered",),
    show_default=True,
    help="Records that came to this end; may be repeated.",
)
@click.option("--app", metavar="MODULE:APP", help="Another app than that of the run.")
@click.option("--on-failure", metavar="skip|dead-letter:TOPIC", help="Instead of the handlers' own policies.")
@options.master
@options.app_dir
@options.as_json("what became of them")
def redrive(
    directory: str,
    *,
    out: str,
    statuses: tuple[str, ...],
    app: str | None,
    on_failure: str | None,
    master: str,
    app_dir: str,
    as_json: bool,
) -> None:
    """Run the handlers once more over failed records of a run.

    They are taken from the rows of the run in DIR. The topic is not read and nothing is committed to the group.
    What fails again is a row in OUT.
    """
    from aioshard.spark.draining.redriving import redrive as run_again  # noqa: PLC0415 - pyspark is imported on use

    RunDirectory(directory).plan()
    with session(master, app_dir) as spark:
        rows = run_again(spark, directory, out=out, status=statuses, app=app, on_failure=on_failure)
        counts = {row["status"]: int(row["count"]) for row in rows.groupBy("status").count().collect()}
    if as_json:
        click.echo(json.dumps({"out": out, "statuses": counts}))
        return
    said = ", ".join(f"{count:,} {name.replace('_', '-')}" for name, count in sorted(counts.items()))
    click.echo(f"{sum(counts.values()):,} record(s) once more: {said}")


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


@click.group(cls=InOrder)
def command() -> None:
    """Run an app's handlers over history: plan, drain, verify, hand over.

    DIR is the directory of one run. It holds the plan, how far the run is, and the outcome of each record as Parquet.
    """


for _command in (plan, drain, follow, status, stop, verify, handover, redrive):
    command.add_command(_command)
