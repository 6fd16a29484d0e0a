"""`aioshard report what-if`: what a run would have been with other numbers."""

from typing import TYPE_CHECKING

import click

from aioshard.cli.report_options import AskedOf, journal_only, opened, print_json
from aioshard.cli.tables import as_text, print_table

if TYPE_CHECKING:
    from aioshard.spark.analysis.trust import Answer
    from aioshard.spark.analysis.what_if import WhatIf

__all__ = ["what_if"]


@click.command()
@journal_only("the predictions, and how far they can be trusted,", "What other numbers would come to")
@click.option(
    "--candidate",
    "-c",
    "candidates",
    multiple=True,
    metavar="NAME=VALUE,…",
    help="A configuration: shards, concurrency, max_buffered_records, partitions, members, dies_at, takeover, "
    "session_timeout. What is left out is as it was. May be repeated; without it, some that suggest themselves.",
)
@click.option("--limit", type=click.IntRange(1), help="Only the first records, so many; by default a million.")
def what_if(*, of: AskedOf, as_json: bool, candidates: tuple[str, ...], limit: int | None) -> None:
    """What the run of JOURNAL would have been with other numbers.

    `-c shards=64` is 64 fixed shards, `-c concurrency=64` are 64 workers with shards on demand.
    `-c members=3,dies_at=60` has one of three members die after a minute.
    """
    from aioshard.spark.analysis.candidate import Candidate  # noqa: PLC0415 - imported on use

    asked_about = [Candidate.parse(text) for text in candidates]
    with opened(of) as journal:
        from aioshard.spark.analysis.what_if import DEFAULT_LIMIT, ask  # noqa: PLC0415 - imported on use

        found = ask(journal, asked_about, of.handler, limit=limit or DEFAULT_LIMIT)
    if as_json:
        print_json(found)
    else:
        _show(found)


def _show(found: "WhatIf") -> None:
    from aioshard.spark.analysis.wording import sentences, trusted  # noqa: PLC0415 - imported on use

    for sentence in trusted(found):
        click.echo(as_text(sentence))
    click.echo("")
    print_table(
        ("candidate", "takes", "off by up to", "99 % within", "99 % wait", "workers busy", "members' work"),
        [_row(answer) for answer in found.answers],
    )
    click.echo("")
    for sentence in sentences(found):
        click.echo(as_text(sentence))


def _row(answer: "Answer") -> tuple[str, ...]:
    from aioshard.spark.analysis.wording import duration_as_text, share_as_text  # noqa: PLC0415 - imported on use

    prediction = answer.prediction
    if prediction is None:
        return (answer.candidate.label, answer.not_predicted or "", "", "", "", "", "")
    most, least = max(prediction.member_work), min(prediction.member_work)
    shares = "" if len(prediction.member_work) == 1 else f"{duration_as_text(least)} to {duration_as_text(most)}"
    return (
        answer.candidate.label,
        duration_as_text(prediction.makespan),
        share_as_text(answer.off_by or 0),
        duration_as_text(prediction.total[1]),
        duration_as_text(prediction.wait[1]),
        share_as_text(prediction.busy),
        shares,
    )
