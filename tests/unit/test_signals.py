"""The first signal requests a shutdown, in any state of standard error."""

import os
import signal

import pytest

from aioshard.signals import Signals


def test_a_signal_requests_the_shutdown_although_standard_error_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: object) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(os, "write", write)
    requested: list[str] = []
    with Signals(action=lambda: requested.append("shutdown")) as signals:
        signal.raise_signal(signal.SIGTERM)
    assert (requested, signals.received) == (["shutdown"], "SIGTERM")
