"""`python -m benchmarks p1 --json`: measure, print, and exit with 3 if a required figure is missed."""

import asyncio
import contextlib
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import click
from rich.console import Console

from benchmarks import p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11, p12, p13, p14, p15, p16, p17, p18, p19, p21, p22
from benchmarks.machine import described, machine
from benchmarks.report import Report
from benchmarks.stage import ContestantFailedError, Stage, stage
from tests.support.kafka import KafkaFailedError
from tests.support.kafka_libs import BrokerUnavailableError

EXIT_MISSED = 3
WIDTH = 140
"""Columns if the output is not a terminal."""

Run = Callable[[Stage], Awaitable[Report]]

ON_A_BROKER: dict[str, Run] = {
    "p1": p1.run,
    "p2": p2.run,
    "p3": p3.run,
    "p4": p4.run,
    "p5": p5.run,
    "p6": p6.run,
    "p8": p8.run,
    "p9": p9.run,
    "p10": p10.run,
    "p11": p11.run,
    "p12": p12.run,
    "p13": p13.run,
    "p15": p15.run,
    "p16": p16.run,
    "p17": p17.run,
    "p18": p18.run,
    "p19": p19.run,
    "p21": p21.run,
    "p22": p22.run,
}
ALONE = {"p7": p7.run, "p14": p14.run}
"""Benchmarks that need no broker."""
NAMES = sorted([*ON_A_BROKER, *ALONE], key=lambda name: int(name[1:]))


@click.command(epilog="Exit codes: 0 every must is met, 1 it could not be measured, 2 usage, 3 a must is missed.")
@click.argument("names", nargs=-1, type=click.Choice([*NAMES, "all"]))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.option("--markdown", is_flag=True, help="Print tables to paste into a page.")
@click.option("--quick", is_flag=True, help="Tiny inputs, to see that everything works; figures are not judged.")
@click.option("--bootstrap-servers", metavar="HOST:PORT", help="Use this cluster instead of starting a broker.")
def main(names: tuple[str, ...], *, as_json: bool, markdown: bool, quick: bool, bootstrap_servers: str | None) -> None:
    """Measure aioshard and its peers on a real broker. NAMES are p1 to p22, or all, the default."""
    chosen = [name for name in NAMES if not names or "all" in names or name in names]
    progress = Console(stderr=True)
    before = machine()
    try:
        reports = asyncio.run(_measure(chosen, bootstrap_servers, quick=quick, progress=progress))
    except (BrokerUnavailableError, KafkaFailedError, ContestantFailedError) as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(_as_object(reports, before, quick=quick)))
    elif markdown:
        for report in reports:
            click.echo(report.markdown())
        click.echo(described(before))
    else:
        console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
        for report in reports:
            report.show(console)
        console.print(f"\n{described(before)}", style="dim", soft_wrap=True, highlight=False)
    sys.exit(0 if all(report.passed for report in reports) else EXIT_MISSED)


async def _measure(names: list[str], bootstrap: str | None, *, quick: bool, progress: Console) -> list[Report]:
    """Run the benchmarks one after the other on one broker, which is started only if one of them needs it."""
    reports = []
    async with contextlib.AsyncExitStack() as stack:
        shared: Stage | None = None
        for name in names:
            if name in ALONE:
                reports.append(await ALONE[name](quick=quick))
                continue
            if shared is None:
                shared = await stack.enter_async_context(stage(bootstrap, quick=quick, progress=progress))
            try:
                reports.append(await ON_A_BROKER[name](shared))
            finally:
                await shared.tidy()
    return reports


def _as_object(reports: list[Report], before: dict[str, Any], *, quick: bool) -> dict[str, Any]:
    """Return the report of one benchmark, or an object that lists several."""
    common = {"machine": before, "quick": quick}
    if len(reports) == 1:
        return reports[0].asdict() | common
    return {
        "benchmarks": [report.asdict() for report in reports],
        "passed": all(report.passed for report in reports),
    } | common


if __name__ == "__main__":
    main()
