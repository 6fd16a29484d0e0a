"""An app without handlers publishes, and joins no group."""

import asyncio

from aioshard import App
from aioshard.testing import TestClient, run


def test_an_app_without_handlers_publishes_and_joins_no_group() -> None:
    app = App("api")

    async def test() -> None:
        async with TestClient(app) as client:
            assert app.statistics().state == "running"
            assert await app.publish("orders", {"amount": 3}, partition=0) == 0
            await client.settle()

            assert [record.value for record in client.records("orders")] == [b'{"amount":3}']
            assert client.transports == []
            assert [finding.kind for finding in app.diagnose().findings] == ["nothing assigned"]
            assert "no handlers" in app.explain()
        assert app.statistics().state == "stopped"

    run(test())


def test_it_stays_healthy_without_a_group() -> None:
    """Nothing turns in it that could be missed (I11)."""
    app = App("api", stuck_after=1.0)

    async def test() -> None:
        async with TestClient(app) as client:
            await client.settle()
            await asyncio.sleep(600.0)
            assert app.statistics().state == "running"
            assert [finding.kind for finding in app.diagnose().findings] == ["nothing assigned"]
            await app.drain()

    run(test())
