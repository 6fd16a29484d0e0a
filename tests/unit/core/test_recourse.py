"""What may be asked for when attempts are used up, and the account of diversions."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioshard import Budget, DeadLetter, Park
from aioshard.core.on_failure import BudgetAccount
from aioshard.errors import HandlerError


@pytest.mark.parametrize(
    ("option", "arguments", "named"),
    [
        (Budget, {"per_success": 0.0}, "per_success=0.0"),
        (Budget, {"per_success": 1.5}, "per_success=1.5"),
        (Budget, {"per_success": "0.1"}, "per_success='0.1'"),
        (Budget, {"burst": 0}, "burst=0"),
        (Budget, {"burst": 2.5}, "burst=2.5"),
        (Budget, {"burst": True}, "burst=True"),
        (DeadLetter, {"topic": ""}, "topic=''"),
        (DeadLetter, {"topic": "not a topic"}, "topic='not a topic'"),
        (DeadLetter, {"topic": None}, "topic=None"),
        (DeadLetter, {"topic": "t", "budget": 0.1}, "budget=0.1"),
        (Park, {"topic": ".."}, r"topic='\.\.'"),
        (Park, {"topic": "t", "delay": 0}, "delay=0"),
        (Park, {"topic": "t", "delay": float("nan")}, "delay=nan"),
        (Park, {"topic": "t", "delay": float("inf")}, "delay=inf"),
        (Park, {"topic": "t", "delay": "60"}, "delay='60'"),
        (Park, {"topic": "t", "attempts": 0}, "attempts=0"),
        (Park, {"topic": "t", "attempts": 1.0}, "attempts=1.0"),
    ],
)
def test_what_cannot_work_is_refused_in_a_sentence(option: Any, arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(HandlerError, match=f"{option.__name__}.*{named}.*was refused: expected"):
        option(**arguments)


def test_a_dead_letter_has_a_budget_unless_it_is_taken_away() -> None:
    assert DeadLetter("d").budget == Budget(per_success=0.01, burst=50)
    assert DeadLetter("d", budget=None).budget is None


steps = st.lists(st.tuples(st.integers(0, 500), st.integers(0, 3)), max_size=60)


@given(steps, st.sampled_from([0.001, 0.01, 0.1, 0.3, 1.0]), st.integers(1, 20))
def test_diversions_never_exceed_the_burst_and_what_successes_have_paid(
    steps: list[tuple[int, int]], per_success: float, burst: int
) -> None:
    account = BudgetAccount(Budget(per_success=per_success, burst=burst))
    successes = spent = 0
    for more, wanted in steps:
        successes += more
        for _ in range(wanted):
            spent += account.spend(successes)
        assert spent <= burst + successes * per_success + 1e-6
        assert account.left(successes) <= burst


def test_a_hundred_successes_pay_for_one_diversion() -> None:
    account = BudgetAccount(Budget(per_success=0.01, burst=1))
    assert account.spend(0)
    assert [account.spend(successes) for successes in range(1, 101)].index(True) == 99


def test_more_than_the_burst_is_not_saved_up() -> None:
    account = BudgetAccount(Budget(per_success=1.0, burst=3))
    assert account.left(1_000) == 3
    assert [account.spend(1_000) for _ in range(4)] == [True, True, True, False]
