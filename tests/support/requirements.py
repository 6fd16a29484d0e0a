"""Requirements of the tests besides Python: without one of them, a test is skipped, and fails in CI."""

import os
import sys
from collections.abc import Callable
from typing import NoReturn

import pytest


def in_ci() -> bool:
    """Whether this runs where something missing is an error."""
    return os.environ.get("CI", "").lower() in {"1", "true", "yes"}


def skip_or_fail(what: str, missing: Exception | str) -> NoReturn:
    """Skip what needs something that is not here; in CI, which must have it, fail."""
    if in_ci():
        pytest.fail(f"no {what}, which CI must have: {missing}", pytrace=False)
    pytest.skip(f"no {what}: {missing}")


def provide(what: str, find: Callable[[], object], unavailable: type[RuntimeError]) -> int:
    """Find something and say where it is, or say that tests go without it.

    Returns:
        Exit code: what is missing is an error only in CI.
    """
    try:
        found = find()
    except unavailable as missing:
        consequence = "fail" if in_ci() else "be skipped"
        print(f"NO {what.upper()}, tests that need it will {consequence}: {missing}", file=sys.stderr)
        return 1 if in_ci() else 0
    print(f"{what}: {found}")
    return 0
