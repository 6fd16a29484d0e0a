"""Run the Sentry recipe in a separate process, because the SDK patches modules of the process.

Prints the events that reach the transport, as JSON.
"""

import asyncio
import functools
import json
from typing import Any
from unittest import mock

import sentry_sdk
from sentry_sdk.envelope import Envelope
from sentry_sdk.transport import Transport

from aioshard import App
from aioshard.testing import InMemoryBroker, TestClient, run
from tests.project.docs.recipes import load

SECRET = "alice-1f0c"
CASES = ("fails", "recovers", "hangs", "is revoked", "cannot be decoded")
"""The record of each has its number as partition and as total of the order."""
LAST = 5
"""Number of attempts in the recipe."""
DRAIN = 1.0
"""Seconds, much less than the timeout of an attempt."""

events: list[Any] = []
attempts: dict[str, int] = dict.fromkeys(CASES, 0)
hanging = asyncio.Event()


class KeepingTransport(Transport):
    """Keeps the events instead of sending them."""

    def capture_envelope(self, envelope: Envelope) -> None:
        event = envelope.get_event()
        if event is not None:
            events.append(event)


async def charge(order: Any) -> None:
    case = CASES[order.total]
    attempts[case] += 1
    run = attempts[case]
    if case == "fails" or (case == "recovers" and run == 1) or (case == "is revoked" and run < LAST):
        raise LookupError("no such customer")
    if case == "hangs":
        await asyncio.sleep(1000.0)
    if case == "is revoked" and run == LAST:
        hanging.set()
        await asyncio.sleep(1000.0)


async def scenario(app: App) -> None:
    broker = InMemoryBroker()
    broker.create_topic("orders", len(CASES))
    app.configure(drain_timeout=DRAIN)
    async with TestClient(app, broker=broker) as client:
        revoked = CASES.index("is revoked")
        await publish(client, revoked)
        await hanging.wait()
        await client.revoke("orders", revoked)
        await client.assign("orders", revoked)
        for number in range(len(CASES)):
            if number != revoked:
                await publish(client, number)
        await client.settle(timeout=600.0)


async def publish(client: TestClient, number: int) -> None:
    total = '"many"' if CASES[number] == "cannot be decoded" else number
    await client.publish("orders", f'{{"customer": "{SECRET}", "total": {total}}}', partition=number)


def main() -> None:
    init = functools.partial(sentry_sdk.init, dsn="https://public@sentry.example/1", transport=KeepingTransport)
    with mock.patch.object(sentry_sdk, "init", init):
        recipe = load("Sentry")
    recipe["charge"] = charge
    run(scenario(recipe["app"]))
    print(json.dumps({"events": events, "attempts": attempts}, default=str))


if __name__ == "__main__":
    main()
