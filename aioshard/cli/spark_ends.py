"""`aioshard spark verify|handover|redrive`: the end of a run, and what comes after it."""

import dataclasses
import json
import sys
from pathlib import Path

import click

from aioshard.cli import options
from aioshard.cli.sides import run
from aioshard.cli.spark_session import session
from aioshard.cli.tables import print_table
from aioshard.kafka.connecting import silence_client
from aioshard.spark.ending.handover import handover as hand_over
from aioshard.spark.ending.letters import letters_owed, send_letters
from aioshard.spark.runs.directory import RunDirectory

__all__ = ["handover", "redrive", "verify"]

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
