"""The number of seeds per simulation, and of examples per state machine: few by default, thousands in a long run."""

import itertools
import os

import pytest

SEEDS = int(os.environ.get("AIOSHARD_TEST_SEEDS", "10"))
CHUNK = 50
"""Seeds of one test."""


def with_seeds(divisor: int = 1, *, least: int = 1, chunk: int = CHUNK) -> pytest.MarkDecorator:
    """Give a test its `seeds`, a range: all of them, or a fraction where one takes long, but *least* at any rate."""
    last = max(SEEDS // divisor, least)
    borders = [*range(0, last, chunk), last]
    return pytest.mark.parametrize("seeds", [range(*border) for border in itertools.pairwise(borders)], ids=str)
