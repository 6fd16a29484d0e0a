"""Output of a run over dead letters: its plan with `--dry-run`, and its result."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import click

from aioshard.cli.output import print_json, print_result
from aioshard.dead_letters.plan import Plan
from aioshard.dead_letters.replaying import Preview
from aioshard.dead_letters.results import Failed, Result
from aioshard.records import counted

_SHOWN = 20
"""Maximum number of failures that are printed."""


class Report(NamedTuple):
    """Prints the plan of a run, and its result."""

    topic: str
    plan: Plan
    verb: str
    """As in: dead letters were sent back."""
    remarks: Sequence[str]
    as_json: bool

    def show_plan(self, preview: Preview | None) -> None:
        """Print how many dead letters a run would work on.

        Args:
            preview: The effect of the transform; None without one.
        """
        plan = self.plan
        content: dict[str, Any] = {
            "topic": self.topic,
            "dry_run": True,
            "selected": len(plan),
            "replayed": plan.done,
            "beyond_limit": plan.beyond_limit,
            "topics": plan.topics,
            "errors": plan.errors,
        }
        lines = [_with_topics(f"{counted(len(plan), 'dead letter')} would be {self.verb}", plan.topics), *self.remarks]
        if preview is not None:
            changed, left_alone, failed = preview
            content |= {"changed": changed, "left": left_alone, "failed": _as_objects(failed)}
            lines.append(
                f"The transform changes {changed:,}, leaves {left_alone:,} alone and fails for {len(failed):,}"
            )
        print_result(content, lines, as_json=self.as_json)
        if preview is not None:
            _echo_failed(preview.failed)

    def show_result(self, result: Result, error: Exception | None = None) -> None:
        """Print how far a run has come; on standard error if it was cut short.

        Args:
            result: Its result.
            error: The error that has ended it.
        """
        if self.as_json:
            content = {
                "topic": self.topic,
                "done": result.done,
                "failed": _as_objects(result.failed),
                "error": None if error is None else str(error) or type(error).__name__,
                "edited": result.edited,
                "left": result.left_alone,
                "stopped": result.stopped,
            }
            print_json(content)
        else:
            self._echo_result(result, is_cut_short=error is not None or result.stopped)
        _echo_failed(result.failed)

    def _echo_result(self, result: Result, *, is_cut_short: bool) -> None:
        total = result.done.total()
        were = "was" if total == 1 else "were"
        click.echo(_with_topics(f"{counted(total, 'dead letter')} {were} {self.verb}", result.done), err=is_cut_short)
        for remark in self.remarks:
            click.echo(remark, err=is_cut_short)
        if result.left_alone:
            click.echo(f"The transform left {counted(result.left_alone, 'dead letter')} alone", err=is_cut_short)
        if result.stopped:
            due = len(self.plan) - result.total()
            click.echo(f"Stopped: {counted(due, 'dead letter')} of this run stay due", err=True)


def by_topic(topics: Counter[str]) -> str:
    """Return numbers by topic on one line, the highest first."""
    return ", ".join(f"{topic} {count:,}" for topic, count in topics.most_common())


def _with_topics(sentence: str, topics: Counter[str]) -> str:
    return f"{sentence}: {by_topic(topics)}" if topics else sentence


def _as_objects(failed: Sequence[Failed]) -> list[dict[str, str]]:
    return [failure.as_object() for failure in failed]


def _echo_failed(failed: Sequence[Failed]) -> None:
    for dead_letter, reason in failed[:_SHOWN]:
        click.echo(f"Failed: {dead_letter.source} (dead letter {dead_letter.at}): {reason}", err=True)
    if len(failed) > _SHOWN:
        click.echo(f"Failed: {len(failed) - _SHOWN:,} more; --json names all of them", err=True)
