"""The plugin for pytest, which loads it by itself: a fixture and a marker that need no import.

* `aioshard_client` is `TestClient`: `async with aioshard_client(app) as client:`.
* `@pytest.mark.aioshard_virtual_time` runs an `async def` test as `aioshard.testing.run` does, so its waits take no
  time. It takes the same arguments, such as `seed=7`, and needs no other plugin for async tests.
"""

import inspect

import pytest

from aioshard.testing.client import TestClient
from aioshard.testing.loop import run

_MARKER = "aioshard_virtual_time"


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", f"{_MARKER}(seed=None): run an async test on a loop whose waits take no time")


@pytest.fixture
def aioshard_client() -> type[TestClient]:
    """Return `aioshard.testing.TestClient`, which runs an app on an in-memory broker."""
    return TestClient


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that has the marker."""
    marker = pyfuncitem.get_closest_marker(_MARKER)
    if marker is None:
        return None
    function = inspect.unwrap(pyfuncitem.obj)  # other plugins wrap it to run in real time
    names = [name for name in inspect.signature(function).parameters if name in pyfuncitem.funcargs]
    run(function(**{name: pyfuncitem.funcargs[name] for name in names}), *marker.args, **marker.kwargs)
    return True
