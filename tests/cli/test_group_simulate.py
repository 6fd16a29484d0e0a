"""`aioshard group simulate`: who would get what, and what the death of each member changes."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aioshard.cli.main import main

Simulate = Callable[..., tuple[int, str, str]]

TOPICS = [f"--topic=T{number}={count}" for number, count in enumerate((2, 1, 2, 1, 2), start=1)]
ARTICLE = [*TOPICS, "-m", "C1", "-m", "C2=T1,T3,T5", "-m", "C3=T1,T3,T5", "-m", "C4"]


@pytest.fixture
def simulate(capsys: pytest.CaptureFixture[str]) -> Simulate:
    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["group", "simulate", *arguments])
        printed = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, printed.out, printed.err

    return run


def found(simulate: Simulate, *arguments: str) -> Any:
    code, out, err = simulate(*arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


@pytest.mark.parametrize(
    ("assignor", "counts"),
    [("range", [5, 3, 0, 0]), ("roundrobin", [3, 3, 0, 2]), ("fair", [2, 2, 2, 2]), ("sticky", [2, 2, 2, 2])],
)
def test_five_topics_and_four_members_under_each_assignor(simulate: Simulate, assignor: str, counts: list[int]) -> None:
    answer = found(simulate, *ARTICLE, "--assignor", assignor)

    assert [len(member["partitions"]) for member in answer["members"].values()] == counts
    assert [member["share"] for member in answer["members"].values()] == [count / 8 for count in counts]


def test_people_get_two_tables(simulate: Simulate) -> None:
    code, out, _ = simulate("-t", "orders=5", "-t", "clicks=2", "-m", "a", "-m", "b=orders", "--assignor", "range")

    assert code == 0
    assert out == (
        "member  partitions  share   gets\n"
        "a       5           71.4 %  clicks/0-1 orders/0-2\n"
        "b       2           28.6 %  orders/3-4\n"
        "\n"
        "7 partitions, 2 members, standbys: none\n"
        "\n"
        "dies  taken over by   others move  most  least  busiest\n"
        "a     b +3, nobody 2  0            5     5      5 -> 5 (71.4 %)\n"
        "b     a +2            0            7     7      5 -> 7 (100.0 %)\n"
    )


def test_sticky_moves_nothing_of_those_who_live_and_fair_does(simulate: Simulate) -> None:
    sticky = found(simulate, *ARTICLE)
    fair = found(simulate, *ARTICLE, "--assignor", "fair")

    assert [death["others_moved"] for death in sticky["deaths"]] == [0, 0, 0, 0]
    assert all(death["others_moved"] > 0 for death in fair["deaths"])


def test_without_a_standby_one_member_has_twice_as_much_and_with_one_none_has_more(simulate: Simulate) -> None:
    without = found(simulate, "-t", "t=20", "--members", "20")
    with_one = found(simulate, "-t", "t=20", "--members", "21")

    assert without["standbys"] == []
    assert {(death["most"], death["least"]) for death in without["deaths"]} == {(2, 1)}
    assert with_one["standbys"] == ["m21"]
    assert {(death["most"], death["least"]) for death in with_one["deaths"]} == {(1, 1)}
    assert with_one["deaths"][4] == {
        "member": "m05",
        "taken_over_by": {"m21": 1},
        "taken_over_by_nobody": 0,
        "others_moved": 0,
        "most": 1,
        "least": 1,
    }


def test_a_backlog_is_spread_and_shown(simulate: Simulate) -> None:
    arguments = ["-t", "t=4", "--members", "2", "-b", "t/0=900", "-b", "t/1=600", "-b", "t/2=300"]

    lag = found(simulate, *arguments, "--assignor", "lag")
    _, out, _ = simulate(*arguments, "--assignor", "lag")

    assert [member["backlog"] for member in lag["members"].values()] == [900, 900]
    assert [death["most_backlog"] for death in lag["deaths"]] == [1800, 1800]
    assert "900 -> 1800 (100.0 %)" in out


def test_a_file_says_the_same_and_options_add_to_it(
    simulate: Simulate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = {"topics": {"t": 2, "u": 1}, "members": {"a": ["t"], "b": None}, "backlog": {"t/1": 5}}
    path = tmp_path / "group.json"
    path.write_text(json.dumps(described))
    options = ["-t", "t=2", "-t", "u=1", "-m", "a=t", "-m", "b", "-m", "c=u", "-b", "t/1=5"]

    from_file = found(simulate, "--file", str(path), "-m", "c=u")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(path.read_bytes())))
    from_input = found(simulate, "--file", "-", "-m", "c=u")

    assert from_file == from_input == found(simulate, *options)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "there is nothing to assign"),
        (["-t", "t=2"], "there is nothing to assign"),
        (["-t", "t"], "'t' has no =NUMBER"),
        (["-t", "a b=2"], "'a b' is not a topic's name"),
        (["-t", "t=0", "--members", "1"], "the partitions of t: a whole number from 1 to 100000 was expected"),
        (["-t", "t=2", "-m", "a=u"], "member a subscribes to u, which --topic does not name"),
        (["-t", "t=2", "-m", "a", "-b", "t/2=5"], "there is no partition 't/2'"),
        (["-t", "t=2", "-m", "a", "-b", "t/1=-5"], "the backlog of t/1: a whole number of at least 0 was expected"),
        (["-t", "t=2", "-m", "a", "--assignor", "best"], "'best' is not one of"),
    ],
)
def test_what_makes_no_sense_is_a_sentence(simulate: Simulate, arguments: list[str], reason: str) -> None:
    code, out, err = simulate(*arguments)

    assert (code, out) == (2, "")
    assert reason in err


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "is not JSON"),
        ("[]", "an object of the objects topics, members and backlog was expected"),
        ('{"topics": 3}', "an object of the objects topics, members and backlog was expected"),
        ('{"topic": {}}', "topic: only topics, members, backlog were expected"),
        ('{"topics": {"t": true}, "members": {"a": null}}', "was expected, not True"),
        ('{"topics": {"t": 1}, "members": {"a": "t"}}', "the topics of member a are a list of names"),
    ],
)
def test_a_file_that_makes_no_sense_is_a_sentence(
    simulate: Simulate, tmp_path: Path, content: str, reason: str
) -> None:
    path = tmp_path / "group.json"
    path.write_text(content)

    code, out, err = simulate("--file", str(path))

    assert (code, out) == (2, "")
    assert reason in err
