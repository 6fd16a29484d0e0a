"""Assignors: valid, balanced, sticky, and independent of input order."""

import itertools
import random
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioshard.core.assignment import ASSIGNORS, Assignment, Member, Partitions, backlogs, owners, without_moves
from aioshard.records import TopicPartition

T = TypeVar("T")
Members = Mapping[str, Member]

EVERY_ASSIGNOR = pytest.mark.parametrize("name", ASSIGNORS)

ARTICLE_PARTITIONS = {"T1": range(2), "T2": range(1), "T3": range(2), "T4": range(1), "T5": range(2)}
ARTICLE_MEMBERS = {
    "C1": Member(frozenset({"T1", "T2", "T3", "T4", "T5"})),
    "C2": Member(frozenset({"T1", "T3", "T5"})),
    "C3": Member(frozenset({"T1", "T3", "T5"})),
    "C4": Member(frozenset({"T1", "T2", "T3", "T4", "T5"})),
}


# Generated groups ------------------------------------------------------------------------


def drawn(
    chance: random.Random, most_members: int, most_topics: int, most_partitions: int
) -> tuple[Members, Partitions]:
    """A group in which everybody subscribes to something, some had something, and some of that is not so any more."""
    partitions = {
        f"t{number}": range(chance.randint(1, most_partitions)) for number in range(chance.randint(1, most_topics))
    }
    everything = [TopicPartition(topic, number) for topic in partitions for number in partitions[topic]]
    known = [*partitions, "unknown"]
    members = {}
    alike = chance.random() < 0.3
    for number in range(chance.randint(1, most_members)):
        topics = frozenset(partitions if alike else chance.sample(known, chance.randint(1, len(known))))
        owned = chance.sample(everything, chance.randint(0, len(everything)) // 2)
        owned += [TopicPartition("gone", 3)] * (chance.random() < 0.1)
        left = {at: chance.choice([0, 3, chance.randint(0, 10_000)]) for at in owned if chance.random() < 0.9}
        members[f"m{number}"] = Member(topics, tuple(owned), chance.randint(-1, 3), left)
    return members, partitions


SEEDS = st.integers(0, 2**64)
GROUPS = st.builds(lambda seed: drawn(random.Random(seed), 8, 6, 8), SEEDS)


def shuffled(members: Members, partitions: Partitions, chance: random.Random) -> tuple[Members, Partitions]:
    """The same group, given in another order."""
    others = {
        name: Member(
            frozenset(mixed(member.topics, chance)),
            tuple(mixed(member.owned, chance)),
            member.generation,
            {at: member.backlogs[at] for at in mixed(member.backlogs, chance)},
        )
        for name, member in ((name, members[name]) for name in mixed(members, chance))
    }
    return others, {topic: mixed(partitions[topic], chance) for topic in mixed(partitions, chance)}


def mixed(things: Iterable[T], chance: random.Random) -> list[T]:
    found = list(things)
    chance.shuffle(found)
    return found


# Measurements ----------------------------------------------------------------------------


def check_validity(members: Members, partitions: Partitions, assignment: Assignment) -> None:
    subscribed = set().union(*(member.topics for member in members.values())) & partitions.keys()
    due = sorted(TopicPartition(topic, number) for topic in subscribed for number in partitions[topic])
    assert list(assignment) == sorted(members)
    assert sorted(itertools.chain(*assignment.values())) == due, "each partition of a subscribed topic, once"
    assert all(at.topic in members[name].topics for name, got in assignment.items() for at in got)


def loads(assignment: Assignment) -> list[int]:
    return sorted(len(got) for got in assignment.values())


def most_even_loads(members: Members, partitions: Partitions) -> list[int]:
    """The loads of the most even assignment, found in another way: one partition after the other is let in, and those
    before it make room along the alternating path that ends at the member with the least."""
    holder: dict[TopicPartition, str] = {}
    load = dict.fromkeys(members, 0)
    for topic in partitions:
        for number in partitions[topic]:
            first = TopicPartition(topic, number)
            came: dict[str, tuple[TopicPartition, str | None]] = {}
            waiting: list[tuple[TopicPartition, str | None]] = [(first, None)]
            while waiting:
                at, before = waiting.pop()
                for name, member in members.items():
                    if at.topic in member.topics and name not in came:
                        came[name] = at, before
                        waiting += [
                            (topic_partition, name) for topic_partition, held_by in holder.items() if held_by == name
                        ]
            if not came:
                continue
            least = min(came, key=load.__getitem__)
            load[least] += 1
            taker: str | None = least
            while taker is not None:
                at, before = came[taker]
                holder[at] = taker
                taker = before
    return sorted(load.values())


def away(members: Members, assignment: Assignment) -> int:
    """How many partitions are not with the one that had them last."""
    latest: dict[TopicPartition, tuple[int, str]] = {}
    for name, member in sorted(members.items()):
        for at in member.owned:
            if at not in latest or latest[at][0] < member.generation:
                latest[at] = member.generation, name
    return sum(at in latest and latest[at][1] != name for name, got in assignment.items() for at in got)


def remembering(members: Members, assignment: Assignment, generation: int = 9) -> dict[str, Member]:
    """The members after they got an assignment; those without one are new."""
    return {name: Member(member.topics, assignment.get(name, ()), generation) for name, member in members.items()}


# Invariants ------------------------------------------------------------------------------


@EVERY_ASSIGNOR
def test_a_thousand_random_subscriptions_are_assigned_validly_and_alike_on_every_member(name: str) -> None:
    chance = random.Random(f"a thousand of {name}")
    for _ in range(1_000):
        members, partitions = drawn(chance, 8, 6, 8)

        assignment = ASSIGNORS[name](members, partitions)

        check_validity(members, partitions, assignment)
        assert ASSIGNORS[name](*shuffled(members, partitions, chance)) == assignment
        if name in {"fair", "sticky"}:
            assert loads(assignment) == most_even_loads(members, partitions)


@given(group=GROUPS, seed=st.integers(min_value=0))
@settings(max_examples=150, deadline=None)
def test_sticky_with_equal_subscriptions_moves_only_what_it_must(group: tuple[Members, Partitions], seed: int) -> None:
    members, partitions = group
    members = {name: Member(frozenset(partitions)) for name in members}
    before = ASSIGNORS["sticky"](members, partitions)
    leaver = random.Random(seed).choice(sorted(members))

    rest = {name: member for name, member in remembering(members, before).items() if name != leaver}
    if rest:
        after = ASSIGNORS["sticky"](rest, partitions)
        assert all(set(before[name]) <= set(after[name]) for name in rest), "only what the leaver had has moved"

    joined = ASSIGNORS["sticky"](remembering(members, before) | {"new": Member(frozenset(partitions))}, partitions)
    assert all(set(joined[name]) <= set(before[name]) for name in members), "only to the one that joined"
    assert len(joined["new"]) == sum(map(len, before.values())) // (len(members) + 1)


@given(seed=SEEDS)
@settings(max_examples=150, deadline=None)
def test_sticky_members_lose_only_partitions_beyond_an_even_load(seed: int) -> None:
    chance = random.Random(seed)
    partitions = {f"t{number}": range(chance.randint(1, 60)) for number in range(chance.randint(1, 4))}
    names = [f"m{number}" for number in range(chance.randint(1, 6))]
    owned: dict[str, list[TopicPartition]] = {name: [] for name in names}
    for at in (TopicPartition(topic, number) for topic, numbers in partitions.items() for number in numbers):
        if (owner := chance.choice([*names[: chance.randint(1, len(names))], None])) is not None:
            owned[owner].append(at)
    members = {name: Member(frozenset(partitions), tuple(owned[name]), 1) for name in names}

    found = ASSIGNORS["sticky"](members, partitions)

    most_first = sorted(map(len, owned.values()), reverse=True)
    assert loads(found) == most_even_loads(members, partitions)
    assert away(members, found) == sum(
        max(had - even, 0) for had, even in zip(most_first, reversed(loads(found)), strict=True)
    )


@given(group=GROUPS)
@settings(max_examples=150, deadline=None)
def test_sticky_and_lag_leave_an_even_assignment_unchanged(group: tuple[Members, Partitions]) -> None:
    members, partitions = group
    before = ASSIGNORS["sticky"](members, partitions)

    assert ASSIGNORS["sticky"](remembering(members, before), partitions) == before
    assert ASSIGNORS["lag"](remembering(members, before), partitions) == before, "nothing is known of any backlog"


@given(group=GROUPS)
@settings(max_examples=150, deadline=None)
def test_lag_is_within_one_largest_backlog_of_the_optimum(group: tuple[Members, Partitions]) -> None:
    members, partitions = group
    left = backlogs(members, partitions, owners(members, partitions))
    largest = max(left.values(), default=0)
    allowance = sum(left.values()) / (100 * len(members))

    found = {name: sum(left[at] for at in got) for name, got in ASSIGNORS["lag"](members, partitions).items()}
    greedy = dict.fromkeys(sorted(members), 0)
    for at in sorted(left, key=lambda one: (-left[one], one)):
        greedy[min((name for name in greedy if at.topic in members[name].topics), key=lambda one: greedy[one])] += left[
            at
        ]

    if sum(left.values()):
        assert max(found.values()) <= max(greedy.values()) + largest + allowance
        if len({frozenset(member.topics & partitions.keys()) for member in members.values()}) == 1:
            assert max(found.values()) - min(found.values()) <= largest + allowance


# How long it takes -----------------------------------------------------------------------


def seconds(name: str, total: int, topics: int, owners: int, joining: int) -> float:
    """CPU time of the assignor when members join the owners of everything, every partition with the same backlog."""
    partitions = {f"t{number}": range(total // topics) for number in range(topics)}
    everything = [TopicPartition(topic, number) for topic in partitions for number in partitions[topic]]
    members = {f"m{number}": Member(frozenset(partitions)) for number in range(owners, owners + joining)}
    for number in range(owners):
        owned = everything[number::owners]
        members[f"m{number}"] = Member(frozenset(partitions), owned, 1, dict.fromkeys(owned, 1_000))
    begin = time.process_time()
    assignment = ASSIGNORS[name](members, partitions)
    spent = time.process_time() - begin
    assert sum(loads(assignment)) == total
    return spent


@pytest.mark.slow
@EVERY_ASSIGNOR
@pytest.mark.parametrize(("topics", "owners", "joining"), [(1, 1, 1), (20, 10, 10)])
def test_assignment_time_grows_about_linearly_with_partitions(
    name: str, topics: int, owners: int, joining: int
) -> None:
    """The leader assigns on its event loop: with a quadratic algorithm it misses its own heartbeats."""
    small, large = (min(seconds(name, total, topics, owners, joining) for _ in range(3)) for total in (1_000, 8_000))

    assert large <= 2.0, "a heartbeat would be late"
    assert large <= 24 * small, "64 times as long is quadratic"


# Known examples --------------------------------------------------------------------------


def as_text(assignment: Assignment) -> dict[str, str]:
    return {name: " ".join(f"{at.topic}-{at.partition}" for at in got) for name, got in assignment.items()}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("range", {"C1": "T1-0 T2-0 T3-0 T4-0 T5-0", "C2": "T1-1 T3-1 T5-1", "C3": "", "C4": ""}),
        ("roundrobin", {"C1": "T1-0 T3-0 T5-0", "C2": "T1-1 T3-1 T5-1", "C3": "", "C4": "T2-0 T4-0"}),
        ("fair", {"C1": "T2-0 T3-0", "C2": "T1-0 T3-1", "C3": "T1-1 T5-0", "C4": "T4-0 T5-1"}),
        ("sticky", {"C1": "T2-0 T3-0", "C2": "T1-0 T3-1", "C3": "T1-1 T5-0", "C4": "T4-0 T5-1"}),
    ],
)
def test_five_topics_are_assigned_to_four_members_with_different_topics(name: str, expected: dict[str, str]) -> None:
    assert as_text(ASSIGNORS[name](ARTICLE_MEMBERS, ARTICLE_PARTITIONS)) == expected


def test_range_splits_each_topic_separately_and_fair_balances_the_total() -> None:
    """Range cuts each topic for itself: C0 has one partition of eight."""
    members = {"C0": Member(frozenset({"T1"}))} | {name: Member(frozenset({"T1", "T2"})) for name in ("C1", "C2")}
    partitions = {"T1": range(3), "T2": range(5)}

    assert as_text(ASSIGNORS["range"](members, partitions)) == {
        "C0": "T1-0",
        "C1": "T1-1 T2-0 T2-1 T2-2",
        "C2": "T1-2 T2-3 T2-4",
    }
    assert sorted(loads(ASSIGNORS["fair"](members, partitions))) == [2, 3, 3]


def test_a_member_that_joins_gets_half_of_each_topic() -> None:
    partitions = {"t": range(40), "u": range(8), "v": range(2)}
    topics = frozenset(partitions)
    everything = tuple(TopicPartition(topic, number) for topic in partitions for number in partitions[topic])

    found = ASSIGNORS["sticky"]({"a": Member(topics, everything, 1), "b": Member(topics)}, partitions)

    assert Counter(at.topic for at in found["a"]) == Counter(at.topic for at in found["b"]) == Counter(t=20, u=4, v=1)


def test_lag_reassigns_everything_if_single_moves_are_not_enough() -> None:
    """A chain of members, each with one partition more than the next, whom only neighbours can help."""
    links = dict(zip(("ab", "bc", "cd", "de", "ef"), (5, 4, 3, 2, 1), strict=True))
    partitions = {link: range(count) for link, count in links.items()}
    members = {}
    for name in "abcdef":
        left = {TopicPartition(link, number): 100 for link in links if link[0] == name for number in partitions[link]}
        members[name] = Member(frozenset(link for link in links if name in link), tuple(left), 1, left)

    found = ASSIGNORS["lag"](members, partitions)

    check_validity(members, partitions, found)
    assert max(loads(found)) <= 4, "one of them had 5, and moving one to its neighbour helps nobody"


def test_a_standby_takes_over_everything_of_a_dead_member() -> None:
    partitions = {"t": range(20)}
    members = {f"m{number:02}": Member(frozenset({"t"})) for number in range(21)}
    before = ASSIGNORS["sticky"](members, partitions)
    (standby,) = (name for name, got in before.items() if not got)

    rest = {name: member for name, member in remembering(members, before).items() if name != "m03"}
    after = ASSIGNORS["sticky"](rest, partitions)

    assert after == {name: got for name, got in before.items() if name != "m03"} | {standby: before["m03"]}


def test_of_two_claimants_the_later_generation_owns_a_partition() -> None:
    topic, had = frozenset({"t"}), (TopicPartition("t", 0),)
    members = {"a": Member(topic, had, 4), "b": Member(topic, had, 5)}

    assert ASSIGNORS["sticky"](members, {"t": range(2)})["b"] == had


@pytest.mark.parametrize("name", ["sticky", "cooperative-fair", "lag", "cooperative-lag"])
def test_several_claimants_of_one_generation_all_release_a_partition(name: str) -> None:
    """The first by name would keep it otherwise, while the others still work on it."""
    topic, contested, kept = frozenset({"t"}), TopicPartition("t", 0), TopicPartition("t", 1)
    members = {
        "a": Member(topic, (contested,), 4),
        "b": Member(topic, (contested,), 5),
        "c": Member(topic, (kept, contested), 5),
        "d": Member(topic, (contested, contested), 5),
    }
    partitions = {"t": range(2)}

    target = ASSIGNORS[name](members, partitions)
    now = without_moves(members, target)

    assert owners(members, partitions) == {kept: "c"}
    assert sum(map(len, target.values())) == 2
    assert now == {"a": (), "b": (), "c": (kept,), "d": ()}


def test_a_later_generation_settles_what_earlier_ones_contested() -> None:
    topic, had = frozenset({"t"}), (TopicPartition("t", 0),)
    members = {"a": Member(topic, had, 4), "b": Member(topic, had, 4), "c": Member(topic, had, 5)}

    assert owners(members, {"t": range(1)}) == {TopicPartition("t", 0): "c"}
    assert without_moves(members, {"a": (), "b": (), "c": had})["c"] == had


def test_a_partition_with_a_long_backlog_gets_a_member_to_itself() -> None:
    topic = frozenset({"t"})
    left = {TopicPartition("t", number): 100_000 if number == 0 else 20_000 for number in range(6)}
    members = {"a": Member(topic, tuple(left), 1, left), "b": Member(topic)}

    found = ASSIGNORS["lag"](members, {"t": range(6)})

    assert {name: sum(left[at] for at in got) for name, got in found.items()} == {"a": 100_000, "b": 100_000}


def test_partitions_without_backlog_are_spread_by_count() -> None:
    topic = frozenset({"t"})
    left = {TopicPartition("t", number): 100_000 if number == 0 else number % 2 for number in range(9)}
    members = {"a": Member(topic, tuple(left), 1, left), "b": Member(topic), "c": Member(topic)}

    assert loads(ASSIGNORS["lag"](members, {"t": range(9)})) == [3, 3, 3]


def test_the_backlog_is_the_owners_or_else_the_smallest_reported() -> None:
    topic, (first, second) = frozenset({"t"}), (TopicPartition("t", 0), TopicPartition("t", 1))
    members = {
        "a": Member(topic, (), -1, {first: 5, second: 70}),
        "b": Member(topic, (first,), 1, {first: 40, second: 60}),
        "c": Member(topic, (), -1, {second: -3}),
    }

    assert backlogs(members, {"t": range(2)}, {first: "b"}) == {first: 40, second: 0}


def test_a_partition_without_a_reported_backlog_counts_as_the_mean() -> None:
    topic = frozenset({"t"})
    left = {TopicPartition("t", 0): 100, TopicPartition("t", 1): 300}
    members = {"a": Member(topic, tuple(left), 1, left), "b": Member(topic)}

    assert backlogs(members, {"t": range(3)}, dict.fromkeys(left, "a")) == left | {TopicPartition("t", 2): 200}
