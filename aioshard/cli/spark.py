"""`aioshard spark`: an app's handlers over history, on Spark."""

import click

from aioshard.cli.groups import InOrder
from aioshard.cli.spark_ends import handover, redrive, verify
from aioshard.cli.spark_plan import plan
from aioshard.cli.spark_runs import drain, follow, status, stop

__all__ = ["command"]


@click.group(cls=InOrder)
def command() -> None:
    """Run an app's handlers over history: plan, drain, verify, hand over.

    DIR is the directory of one run. It holds the plan, how far the run is, and the outcome of each record as Parquet.
    """


for _command in (plan, drain, follow, status, stop, verify, handover, redrive):
    command.add_command(_command)
