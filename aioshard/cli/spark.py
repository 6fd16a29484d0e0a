"""`aioshard spark`: backfills with the handlers of an app, on Spark."""

import asyncio
import contextlib
import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aioshard.cli import options
from aioshard.cli.brokers import run
from aioshard.cli.loading import load_app
from aioshard.cli.output import UNHEALTHY, print_result, progress, table
from aioshard.errors import SettingsError
from aioshard.records import counted
from aioshard.signals import Signals
from aioshard.spark import handovers, planning, runs
from aioshard.spark.plans import MAX_ROWS, Plan
from aioshard.spark.run_directory import RunDirectory
from aioshard.spark.session import check_packages, local_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_print_note = functools.partial(click.echo, err=True)


@click.group(cls=options.OrderedGroup)
def command() -> None:
    """Backfill with an app's handlers: plan, run, verify, hand over.

    DIR is the directory of one run. It contains the plan, the progress, and the outcome of each record as Parquet.
    """


@contextlib.contextmanager
def session(master: str, app_dir: str | None = None) -> "Iterator[SparkSession]":
    """Start a Spark session that finds the modules of *app_dir*; stop it at the end, unless it was already running.

    A signal during the start ends the command once Spark has started. Ending it earlier would remove the file that
    Spark's Java process writes when it is ready: that process would stay, and keep the command's output open. After a
    second signal this process ends, and Java ends with it, because it reads the end of its input.
    """
    if app_dir is not None:
        sys.path.insert(0, str(Path(app_dir).resolve()))
    check_packages()
    from pyspark.sql import SparkSession  # noqa: PLC0415 - imported on use

    ours = SparkSession.getActiveSession() is None
    if ours:
        _print_note(f"Starting Spark ({master}) …")
    with Signals("Spark is starting: the command ends when it has started", lambda: None) as signals:
        try:
            spark = local_session(master)
        except SettingsError:
            if signals.received:  # a terminal sends the signal to every process of the start
                raise KeyboardInterrupt from None
            raise
    try:
        if signals.received:
            raise KeyboardInterrupt
        yield spark
    finally:
        if ours:
            spark.stop()


def _stops_after_batch(run_dir: RunDirectory) -> Signals:
    return Signals("Stopping after the current micro-batch", functools.partial(runs.stop, run_dir))


@command.command()
@options.target
@click.option("--out", "directory", required=True, metavar="DIR", help="Directory of the run; must not exist.")
@click.option(
    "--start",
    type=options.moment("committed", "earliest"),
    default="committed",
    show_default=True,
    metavar="committed|earliest|TIME|FILE",
    help="Start at the group's offsets, the oldest record, the first one not older than a time, or offsets in a file.",
)
@click.option(
    "--end",
    type=options.moment("latest"),
    default="latest",
    show_default=True,
    metavar="latest|TIME|FILE",
    help="End of the run, fixed now.",
)
@click.option("--group", metavar="GROUP", help="Consumer group to start from and hand over to; by default the app's.")
@click.option("--tasks", type=click.IntRange(1), metavar="N", help="Maximum number of tasks of a micro-batch.")
@click.option(
    "--max-rows-per-batch",
    type=click.IntRange(1),
    metavar="N",
    default=MAX_ROWS,
    show_default=True,
    help="Records of a micro-batch: the most that a crash can repeat.",
)
@click.option(
    "--total-concurrency", type=click.IntRange(1), metavar="N", help="Concurrent handler calls of the whole job."
)
@click.option("--on-failure", metavar="skip|dead-letter:TOPIC", help="Overrides the handlers' own policies.")
@click.option("--shuffle", is_flag=True, help="Bring the records of a key together across partitions and topics.")
@options.bootstrap_servers("the app's setting")
@options.app_dir
@options.as_json("the plan")
def plan(target: str, *, directory: str, app_dir: str, as_json: bool, **chosen: Any) -> None:
    """Plan a backfill with MODULE:APP, in a new DIR.

    The plan freezes start, end, settings and the app's version.
    """
    load_app(target, app_dir)
    new_plan = run(planning.plan(target, directory=directory, tell=_print_note, **chosen))
    print_result(
        json.loads(new_plan.to_json()),
        [*_lines_of(new_plan), f"\nNext: aioshard spark run {directory}"],
        as_json=as_json,
        indent=2,
    )


def _lines_of(plan: Plan) -> Iterator[str]:
    rows = [
        (planned.topic, planned.partition, planned.start, planned.end, f"{planned.end - planned.start:,}")
        for planned in plan.ranges
        if planned.end > planned.start
    ]
    partitions = counted(len(rows), "partition")
    yield f"{counted(plan.records, 'offset')} of {partitions} for {plan.app}, instead of {plan.group_id!r}"
    for handler in plan.handlers:
        yield (
            f"  {handler.name}: {', '.join(handler.topics)}; order by {handler.shard_by}; "
            f"on failure {plan.on_failure or handler.on_failure}"
        )
    if rows:
        yield from ["", *table(("topic", "partition", "start", "end", "offsets"), rows)]


@command.command("run")
@options.run_directory
@options.master
@options.app_dir
@options.as_json("the result")
def run_(directory: str, *, master: str, app_dir: str, as_json: bool) -> None:
    """Run the handlers over the remaining records of the run in DIR.

    The first SIGINT or SIGTERM stops it after the current micro-batch, a second one immediately. Run the same
    command again to continue after the last complete micro-batch. If a record halts, the run ends with exit code 3.
    """
    run_dir = RunDirectory(directory)
    run_dir.plan()
    with session(master, app_dir) as spark, _stops_after_batch(run_dir):
        report = asyncio.run(_with_progress(functools.partial(runs.run, spark, run_dir, tell=_print_note), run_dir))
    rows = _counts(report.statuses) or "no rows"
    batches = counted(report.batches, "micro-batch", "micro-batches")
    lines = [
        f"{report.state}: {report.done:,} of {report.records:,} offsets in {batches}, {rows}",
        f"Next: aioshard spark {'verify' if report.state == 'finished' else 'run'} {directory}",
    ]
    print_result(report, lines, as_json=as_json)


async def _with_progress(work: Callable[[], Any], run_dir: RunDirectory) -> Any:
    """Do *work* in a thread, and show its progress after each micro-batch."""
    async with progress("running", lambda: runs.offsets_done(run_dir), total=run_dir.plan().records):
        return await asyncio.to_thread(work)


def _counts(statuses: Any) -> str:
    return ", ".join(f"{count:,} {name.replace('_', '-')}" for name, count in sorted(statuses.items()))


@command.command()
@options.run_directory
@options.master
@click.option(
    "--trigger",
    type=click.FloatRange(0),
    metavar="SECONDS",
    default=10.0,
    show_default=True,
    help="Seconds between the starts of two micro-batches.",
)
@options.app_dir
def follow(directory: str, *, master: str, trigger: float, app_dir: str) -> None:
    """Run the handlers from the planned start, until stopped.

    The first SIGINT or SIGTERM, or `aioshard spark stop DIR`, stops it after the current micro-batch.
    """
    run_dir = RunDirectory(directory)
    run_dir.plan()
    with session(master, app_dir) as spark, _stops_after_batch(run_dir):
        runs.follow(spark, run_dir, trigger=f"{trigger:f} seconds", tell=_print_note)
    click.echo(f"To continue: aioshard spark follow {directory}")


@command.command()
@options.run_directory
@options.as_json("the progress")
def status(directory: str, *, as_json: bool) -> None:
    """Show the progress of the run in DIR, from its files alone."""
    state = runs.status(directory)
    share = 100 * state.done // max(state.records, 1)
    verdicts = {None: "", True: "yes", False: "no: run aioshard spark verify"}
    verified = (state.verified or {}).get("ok")
    rows = {
        "app": f"{state.app} instead of {state.group!r}",
        "done": f"{state.done:,} of {state.records:,} ({share} %)",
        "outcomes": _counts(state.statuses),
        "halted": ", ".join(state.halted),
        "stopping": "after the current micro-batch" if state.stopping else "",
        "verified": verdicts[verified],
        "handed over": "yes" if state.handed_over else "",
    }
    known = [(name, text) for name, text in rows.items() if text]
    print_result(state, table(("run", directory), known), as_json=as_json)


@command.command()
@options.run_directory
def stop(directory: str) -> None:
    """Stop the run in DIR after its current micro-batch."""
    runs.stop(directory)
    click.echo("Requested: the run stops after its current micro-batch.")


@command.command()
@options.run_directory
@options.master
@options.app_dir
@options.as_json("the result")
def verify(directory: str, *, master: str, app_dir: str, as_json: bool) -> int:
    """Verify that each record of a run has exactly one outcome.

    Exits with 3 if not, and names the records.
    """
    from aioshard.spark.verification import verify as verify_run  # noqa: PLC0415 - pyspark is imported on use

    run_dir = RunDirectory(directory)
    run_dir.plan()
    with session(master, app_dir) as spark:
        verification = verify_run(spark, run_dir)
    verdict = f"{'verified' if verification.ok else 'not verified'}: {counted(verification.records, 'record')}"
    print_result(verification.asdict(), [*verification.problems, verdict], as_json=as_json)
    return 0 if verification.ok else UNHEALTHY


@command.command()
@options.run_directory
@click.option(
    "--wait",
    type=click.FloatRange(0),
    metavar="SECONDS",
    help="Seconds to wait for members that were killed, or are static, to expire; by default the session timeout.",
)
@click.option("--force", is_flag=True, help="Commit even if the group has moved since the plan.")
@options.master
@options.app_dir
@options.as_json("the result")
def handover(directory: str, *, wait: float | None, force: bool, master: str, app_dir: str, as_json: bool) -> None:
    """Commit the ends of the verified run in DIR to its group.

    The live app continues exactly there. Dead letters of the run are sent first; this step needs Spark. If the group
    has members or has moved, nothing is committed and the exit code is 4.
    """
    sys.path.insert(0, str(Path(app_dir).resolve()))
    run_dir = RunDirectory(directory)
    if handovers.unsent_dead_letters(run_dir):
        with session(master) as spark:
            handovers.send_dead_letters(spark, run_dir, _print_note)
    done = run(handovers.handover(directory, wait=wait, force=force, tell=_print_note))
    rows = [
        (topic, partition, done.before.get(topic, {}).get(partition), offset)
        for topic, offsets in sorted(done.offsets.items())
        for partition, offset in sorted(offsets.items())
    ]
    lines = [f"{done.state}: group {done.group_id!r}", *table(("topic", "partition", "before", "now"), rows)]
    print_result(done, lines, as_json=as_json)


@command.command()
@options.run_directory
@click.option("--out", required=True, metavar="OUT", help="Directory for the new rows, as Parquet; must not exist.")
@click.option(
    "--status",
    "statuses",
    type=click.Choice(["dead_lettered", "skipped"]),
    multiple=True,
    default=("dead_lettered",),
    show_default=True,
    help="Outcome of the records to process again; repeatable.",
)
@click.option("--app", metavar="MODULE:APP", help="Use another app than the run.")
@click.option("--on-failure", metavar="skip|dead-letter:TOPIC", help="Overrides the handlers' own policies.")
@options.master
@options.app_dir
@options.as_json("the result")
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
    """Process the failed records of a run again.

    They are read from the rows of the run in DIR, not from the topic, and nothing is committed to the group. A record
    that fails again is a row in OUT.
    """
    from aioshard.spark.frame import redrive as run_again  # noqa: PLC0415 - pyspark is imported on use

    RunDirectory(directory).plan()
    with session(master, app_dir) as spark:
        rows = run_again(spark, directory, out=out, status=statuses, app=app, on_failure=on_failure)
        counts = {row["status"]: int(row["count"]) for row in rows.groupBy("status").count().collect()}
    line = f"{counted(sum(counts.values()), 'record')} processed again: {_counts(counts) or 'none'}"
    print_result({"out": out, "statuses": counts}, [line], as_json=as_json)
