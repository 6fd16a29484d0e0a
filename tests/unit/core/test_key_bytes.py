"""Shard keys as bytes: equal exactly if the keys are equal."""

import subprocess
import sys
from collections.abc import Hashable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioshard.core.sharding import key_bytes
from aioshard.errors import HandlerError

PARTS = st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.binary())
KEYS = st.recursive(PARTS, lambda keys: st.lists(keys, max_size=3).map(tuple), max_leaves=6)


@given(KEYS, KEYS)
def test_keys_have_the_same_bytes_exactly_if_they_are_equal(one: Hashable, other: Hashable) -> None:
    assert (key_bytes(one) == key_bytes(other)) == (one == other)
    assert key_bytes(one) == key_bytes(one)


def test_equal_numbers_have_the_same_bytes() -> None:
    assert key_bytes(1) == key_bytes(True)  # noqa: FBT003 - the value is the key


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1", 1),
        (b"a", "a"),
        (("a", "bc"), ("ab", "c")),
        ((("a",), "b"), ("a", ("b",))),
        (None, "None"),
        ((), None),
        (("asb",), ("a", "b")),
    ],
)
def test_different_keys_have_different_bytes(one: Hashable, other: Hashable) -> None:
    assert key_bytes(one) != key_bytes(other)


def test_key_bytes_are_the_same_in_every_process() -> None:
    program = "from aioshard.core.sharding import key_bytes; print(key_bytes(('tenant', 7, ('a', b'b', None))).hex())"
    found = {
        subprocess.check_output([sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, text=True).strip()
        for seed in ("1", "2")
    }
    assert found == {key_bytes(("tenant", 7, ("a", b"b", None))).hex()}


@pytest.mark.parametrize("part", [object(), 1.5, frozenset()], ids=["object", "float", "set"])
def test_a_key_of_another_type_is_refused(part: Hashable) -> None:
    with pytest.raises(HandlerError, match=f"has type {type(part).__name__}"):
        key_bytes(("tenant", part))
