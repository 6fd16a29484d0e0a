"""The stored hash of a key: the same everywhere, and usable for any number of shards."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioshard.core.sharding import key_hash, shard_number, shard_of_hash

KEYS = st.one_of(st.binary(), st.text(), st.integers(), st.tuples(st.text(), st.binary()))


@given(key=KEYS, shards=st.integers(1, 100_000))
def test_the_shard_follows_from_the_hash_alone(key: object, shards: int) -> None:
    hashed = key_hash(key)

    assert hashed is not None
    assert -(2**63) <= hashed < 2**63
    assert shard_of_hash(hashed, shards) == shard_number(key, shards)


def test_different_keys_have_different_hashes() -> None:
    keys = [b"%d" % number for number in range(100_000)]

    assert len({key_hash(key) for key in keys}) == len(keys)


def test_a_key_in_two_topics_has_two_identities_in_one_fixed_shard() -> None:
    one, other = key_hash(("orders", b"k")), key_hash(("returns", b"k"))

    assert one is not None
    assert other is not None
    assert one != other
    assert shard_of_hash(one, 64) == shard_of_hash(other, 64)


def test_a_missing_key_has_no_hash() -> None:
    assert key_hash(None) is None


@pytest.mark.parametrize("seed", ["0", "1"])
def test_the_hash_is_the_same_in_every_process(seed: str) -> None:
    script = (
        "from aioshard.core.sharding import key_hash; print(key_hash('alice'), key_hash(('t', b'k')), key_hash(1.5))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )

    assert ran.stdout == f"{key_hash('alice')} {key_hash(('t', b'k'))} {key_hash(1.5)}\n"
