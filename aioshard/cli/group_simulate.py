"""`aioshard group simulate`: who would get which partitions, and what happens when a member dies."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aioshard.cli.options import as_json
from aioshard.cli.tables import as_text, print_table
from aioshard.core.assignment import ASSIGNORS, Member
from aioshard.core.assignment.simulation import Death, Simulation, simulate
from aioshard.records import TOPIC_NAME, TopicPartition

if TYPE_CHECKING:
    from aioshard.core.assignment import Assignment, Partitions

__all__ = ["simulation"]

_MOST = 100_000
"""Partitions of a topic, and members: more than any cluster has."""


@click.command()
@click.option("--assignor", type=click.Choice(list(ASSIGNORS)), default="sticky", show_default=True, help="As in App.")
@click.option("--topic", "-t", "topics", multiple=True, metavar="NAME=COUNT", help="A topic and its partitions.")
@click.option(
    "--member",
    "-m",
    "named",
    multiple=True,
    metavar="NAME[=TOPIC,…]",
    help="A member and what it subscribes to; without topics, all of them.",
)
@click.option("--members", "count", type=click.IntRange(1, _MOST), help="So many more members, which subscribe to all.")
@click.option(
    "--backlog",
    "-b",
    "backlogs",
    multiple=True,
    metavar="TOPIC/PARTITION=RECORDS",
    help="What is left to read of a partition; of all others it is then nothing.",
)
@click.option(
    "--file",
    "path",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path),
    help='The same as JSON: {"topics": {"T": 2}, "members": {"M": ["T"]}, "backlog": {"T/0": 9}}; - is standard input.',
)
@as_json("the assignment and what each death changes")
def simulation(
    *,
    assignor: str,
    topics: Sequence[str],
    named: Sequence[str],
    count: int | None,
    backlogs: Sequence[str],
    path: Path | None,
    as_json: bool,
) -> None:
    """Work out who would get which partitions, without a broker.

    For the death of each member it says who takes over, what else moves, and how uneven it is then. A member without
    partitions is a standby.
    """
    described = _described(path)
    partitions = _partitions([*described["topics"].items(), *(_pair(text, "--topic") for text in topics)])
    everything = frozenset(partitions)
    members = {name: Member(_subscription(name, names, everything)) for name, names in described["members"].items()}
    for text in named:
        name, _, listed = text.partition("=")
        members[name] = Member(_subscription(name, listed.split(",") if listed else None, everything))
    for number in range(1, (count or 0) + 1):
        members.setdefault(f"m{number:0{len(str(count))}}", Member(everything))
    if not partitions or not members:
        raise click.UsageError("there is nothing to assign: give a --topic and --members at least, or a --file")
    left = _backlogs([*described["backlog"].items(), *(_pair(text, "--backlog") for text in backlogs)], partitions)
    found = simulate(ASSIGNORS[assignor], members, partitions, left)
    if as_json:
        click.echo(json.dumps(_as_object(assignor, found, left)))
    else:
        _show(found, left)


# What is asked ---------------------------------------------------------------------------


def _described(path: Path | None) -> dict[str, Mapping[str, Any]]:
    if path is None:
        found: Any = {}
    else:
        with click.open_file(str(path), encoding="utf-8") as file:
            try:
                found = json.load(file)
            except ValueError as error:
                raise click.BadParameter(f"{path} is not JSON: {error}", param_hint="--file") from error
    parts = ("topics", "members", "backlog")
    if not isinstance(found, dict) or not all(isinstance(found.get(part, {}), dict) for part in parts):
        raise click.BadParameter(
            "an object of the objects topics, members and backlog was expected", param_hint="--file"
        )
    foreign = ", ".join(sorted(found.keys() - set(parts)))
    if foreign:
        raise click.BadParameter(f"{foreign}: only {', '.join(parts)} were expected", param_hint="--file")
    return {part: found.get(part, {}) for part in parts}


def _pair(text: str, option: str) -> tuple[str, str]:
    name, equals, number = text.rpartition("=")
    if not equals:
        raise click.BadParameter(f"{text!r} has no =NUMBER", param_hint=option)
    return name, number


def _partitions(pairs: Iterable[tuple[str, Any]]) -> "Partitions":
    found = {}
    for topic, count in pairs:
        if not TOPIC_NAME.fullmatch(topic):
            raise click.BadParameter(f"{topic!r} is not a topic's name", param_hint="--topic")
        found[topic] = range(_number(count, 1, f"the partitions of {topic}", "--topic"))
    return found


def _subscription(member: str, topics: Any, everything: frozenset[str]) -> frozenset[str]:
    if topics is None:
        return everything
    if not isinstance(topics, list) or not all(isinstance(topic, str) for topic in topics):
        raise click.BadParameter(f"the topics of member {member} are a list of names", param_hint="--member")
    unknown = sorted(set(topics) - everything)
    if unknown:
        raise click.BadParameter(
            f"member {member} subscribes to {', '.join(unknown)}, which --topic does not name", param_hint="--member"
        )
    return frozenset(topics)


def _backlogs(pairs: Iterable[tuple[str, Any]], partitions: "Partitions") -> dict[TopicPartition, int]:
    found = {}
    for text, records in pairs:
        topic, _, number = text.rpartition("/")
        if not number.isdecimal() or int(number) not in partitions.get(topic, ()):
            raise click.BadParameter(f"there is no partition {text!r}", param_hint="--backlog")
        found[TopicPartition(topic, int(number))] = _number(records, 0, f"the backlog of {text}", "--backlog", None)
    return found


def _number(value: Any, least: int, what: str, option: str, most: int | None = _MOST) -> int:
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise click.BadParameter(f"{what}: a whole number {bounds} was expected, not {value!r}", param_hint=option)
    return value


# What is answered ------------------------------------------------------------------------


def _show(found: Simulation, left: Mapping[TopicPartition, int]) -> None:
    headings = ("member", "partitions", "share", *(("backlog", "share") if left else ()), "gets")
    print_table(headings, (_member_row(found, name, left) for name in found.assignment))
    standbys = ", ".join(map(as_text, found.standbys)) or "none"
    click.echo(f"\n{found.partitions} partitions, {len(found.assignment)} members, standbys: {standbys}\n")
    print_table(
        ("dies", "taken over by", "others move", "most", "least", "busiest", *(("most backlog",) if left else ())),
        (_death_row(found, death, left) for death in found.deaths),
    )


def _member_row(found: Simulation, name: str, left: Mapping[TopicPartition, int]) -> tuple[str, ...]:
    got = found.assignment[name]
    behind = sum(left.get(at, 0) for at in got)
    backlog = (str(behind), _share(behind, sum(left.values()))) if left else ()
    return as_text(name), str(len(got)), _share(len(got), found.partitions), *backlog, _runs(got)


def _death_row(found: Simulation, death: Death, left: Mapping[TopicPartition, int]) -> tuple[str, ...]:
    takers = [f"{as_text(name)} +{taken}" for name, taken in death.takers.items()]
    orphans = [f"nobody {death.orphans}"] if death.orphans else []
    before = max(map(len, found.assignment.values()))
    behind = _most_backlog(death.assignment, left)
    backlog = (f"{_most_backlog(found.assignment, left)} -> {behind} ({_share(behind, sum(left.values()))})",)
    return (
        as_text(death.member),
        ", ".join(takers + orphans) or "-",
        str(death.others_moved),
        str(death.most),
        str(death.least),
        f"{before} -> {death.most} ({_share(death.most, found.partitions)})",
        *(backlog if left else ()),
    )


def _most_backlog(assignment: "Assignment", left: Mapping[TopicPartition, int]) -> int:
    return max((sum(left.get(at, 0) for at in got) for got in assignment.values()), default=0)


def _runs(partitions: Sequence[TopicPartition]) -> str:
    """Partitions, with neighbours as a range: `orders/0-3 orders/7`."""
    found: list[tuple[str, int, int]] = []
    for topic, number in partitions:
        if found and found[-1][0] == topic and found[-1][2] == number - 1:
            found[-1] = (topic, found[-1][1], number)
        else:
            found.append((topic, number, number))
    return " ".join(f"{topic}/{first}" if first == last else f"{topic}/{first}-{last}" for topic, first, last in found)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}".replace("%", " %") if whole else "-"


def _as_object(assignor: str, found: Simulation, left: Mapping[TopicPartition, int]) -> dict[str, Any]:
    return {
        "assignor": assignor,
        "partitions": found.partitions,
        "members": {
            name: {
                "partitions": [str(at) for at in got],
                "share": len(got) / found.partitions if found.partitions else 0.0,
                **({"backlog": sum(left.get(at, 0) for at in got)} if left else {}),
            }
            for name, got in found.assignment.items()
        },
        "standbys": list(found.standbys),
        "deaths": [
            {
                "member": death.member,
                "taken_over_by": dict(death.takers),
                "taken_over_by_nobody": death.orphans,
                "others_moved": death.others_moved,
                "most": death.most,
                "least": death.least,
                **({"most_backlog": _most_backlog(death.assignment, left)} if left else {}),
            }
            for death in found.deaths
        ],
    }
