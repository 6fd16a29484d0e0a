"""A client that cannot be built at all is reported once."""

import logging

import pytest

from aioshard import App, Record
from aioshard.errors import SettingsError
from aioshard.ports import Transport
from aioshard.testing import run


def test_a_permanent_client_error_is_raised_and_not_logged_as_a_crash(caplog: pytest.LogCaptureFixture) -> None:
    app = App("billing", auto_offset_reset="earliest")

    @app.consume("orders")
    async def on_order(_: Record) -> None: ...

    def make_transport() -> Transport:
        raise SettingsError("ssl_cafile='ca.pem' cannot be used: it must hold PEM certificates")

    async def scenario() -> None:
        with pytest.raises(SettingsError, match=r"ca\.pem"):
            async with app.started(make_transport):
                pass

    run(scenario())

    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 1
    assert "ca.pem" in errors[0].getMessage()
    assert errors[0].exc_info is None
