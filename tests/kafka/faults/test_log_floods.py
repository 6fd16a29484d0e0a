"""An app inside another program: an outage of its broker does not flood the log of that program."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest
from fastapi import FastAPI

from aioshard import App, Record
from tests.support.kafka import KafkaBroker

Embed = Callable[[App], AbstractAsyncContextManager[object]]
OUTAGE = 20.0
MOST = 40
"""Lines of the whole outage."""


def alone(app: App) -> AbstractAsyncContextManager[object]:
    return app


def in_fastapi(app: App) -> AbstractAsyncContextManager[object]:
    api = FastAPI(lifespan=app.lifespan)
    return api.router.lifespan_context(api)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("embed", [in_fastapi, alone])
async def test_an_outage_writes_few_lines(
    own_kafka: KafkaBroker, topic: str, group: str, embed: Embed, caplog: pytest.LogCaptureFixture
) -> None:
    await own_kafka.create_topic(topic, 4)
    app = App(group, bootstrap_servers=own_kafka.bootstrap, auto_offset_reset="earliest")
    done = asyncio.Event()

    @app.consume(topic)
    async def handle(record: Record) -> None:
        if record.value == b"last":
            done.set()

    caplog.set_level(logging.WARNING)
    async with embed(app):
        caplog.clear()
        await own_kafka.stop()
        await asyncio.sleep(OUTAGE)  # that is how long it lasts
        await own_kafka.start()
        await own_kafka.produce(topic, [(b"k", b"last")])
        await asyncio.wait_for(done.wait(), 60.0)
    lines = [(record.name, record.getMessage()) for record in caplog.records]
    assert len(lines) <= MOST, lines
    assert "onnect" in lines[0][1], lines
