"""Shard keys as bytes: equal where the keys are, and nowhere else."""

import datetime as dt
import enum
import subprocess
import sys
import uuid
from collections.abc import Hashable
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioshard.core.key_bytes import key_bytes
from aioshard.errors import HandlerError

PARTS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.decimals(allow_nan=False),
    st.fractions(),
    st.text(),
    st.binary(),
    st.uuids(),
    st.dates(),
    st.datetimes(timezones=st.one_of(st.none(), st.just(dt.UTC), st.just(dt.timezone(dt.timedelta(hours=2))))),
)
KEYS = st.one_of(PARTS, st.lists(PARTS, max_size=3).map(tuple), st.frozensets(PARTS, max_size=3))


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Size(enum.IntEnum):
    SMALL = 1


@given(KEYS, KEYS)
def test_keys_have_the_same_bytes_exactly_where_they_are_equal(one: Hashable, other: Hashable) -> None:
    assert (key_bytes(one) == key_bytes(other)) == (one == other)
    assert key_bytes(one) == key_bytes(one)


@pytest.mark.parametrize(
    "same",
    [
        (1, True, 1.0, Decimal(1), Fraction(1), Size.SMALL),
        (0.5, Decimal("0.50"), Fraction(1, 2)),
        (0.0, -0.0, 0, False),
        (
            dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC),
            dt.datetime(2026, 1, 1, 14, tzinfo=dt.timezone(dt.timedelta(hours=2))),
        ),
        (frozenset([1, 2]), frozenset([2, 1.0])),
    ],
)
def test_what_python_holds_for_equal_has_the_same_bytes(same: tuple[Hashable, ...]) -> None:
    assert len(set(same)) == 1
    assert len({key_bytes(key) for key in same}) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [("1", 1), (b"a", "a"), (("a", "bc"), ("ab", "c")), ((("a",), "b"), ("a", ("b",))), (Colour.RED, 1)],
)
def test_what_differs_has_other_bytes(one: Hashable, other: Hashable) -> None:
    assert key_bytes(one) != key_bytes(other)


def test_they_are_the_same_in_every_process() -> None:
    key = ("tenant", 7, frozenset(["a", "b", "c"]), uuid.UUID(int=5), Colour.BLUE.value)
    program = (
        "import uuid; from aioshard.core.key_bytes import key_bytes; "
        "print(key_bytes(('tenant', 7, frozenset(['a', 'b', 'c']), uuid.UUID(int=5), 2)).hex())"
    )
    found = {
        subprocess.check_output([sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, text=True).strip()
        for seed in ("1", "2")
    }
    assert found == {key_bytes(key).hex()}


def test_an_object_that_other_processes_cannot_know_is_refused() -> None:
    with pytest.raises(HandlerError, match="type object was found"):
        key_bytes(("tenant", object()))
