"""An app inside another program: an outage of its broker does not flood the log of that program."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal

import pytest
from fastapi import FastAPI

from aioshard import App, Record
from tests.kafka.faults.support import until
from tests.support.kafka import KafkaBroker

Client = Literal["aiokafka", "confluent"]
Embed = Callable[[App], AbstractAsyncContextManager[object]]
OUTAGE = 20.0
MOST = 40
"""Lines of the whole outage. Without a limit, librdkafka alone writes that many in it."""


def alone(app: App) -> AbstractAsyncContextManager[object]:
    return app


def in_fastapi(app: App) -> AbstractAsyncContextManager[object]:
    api = FastAPI(lifespan=app.lifespan)
    return api.router.lifespan_context(api)


def ends_of(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [vars(line) for line in caplog.records if getattr(line, "event", None) == "client_repeats_over"]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("client", "embed"), [("aiokafka", in_fastapi), ("confluent", alone)])
async def test_an_outage_writes_few_lines_and_says_how_many_were_withheld(
    own_kafka: KafkaBroker, topic: str, group: str, client: Client, embed: Embed, caplog: pytest.LogCaptureFixture
) -> None:
    await own_kafka.create_topic(topic, 4)
    app = App(group, bootstrap_servers=own_kafka.bootstrap, auto_offset_reset="earliest", client=client)
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
        if client == "confluent":  # our own client does not repeat itself
            await until(lambda: ends_of(caplog), app.explain)
    lines = [(record.name, record.getMessage()) for record in caplog.records]
    assert len(lines) <= MOST, lines
    assert client == "aiokafka" or sum(end["withheld"] for end in ends_of(caplog)) > MOST
    assert "onnect" in lines[0][1], lines
