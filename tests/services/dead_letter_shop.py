"""An app whose orders have failed, with many dead letters in a real broker."""

import contextlib
import json
from collections.abc import AsyncIterator, Iterator

from fastapi import FastAPI
from pydantic import BaseModel

from aioshard import App, DeadLetter, Park, Record, Retry
from aioshard.ports import Message
from aioshard.serde.side_records import dead_letter
from aioshard.web import dashboard
from tests.kafka.faults.support import until
from tests.support.brokers import SharedKafka
from tests.support.browsing import served
from tests.support.dead_letters import failure, write

TOKEN = "only-for-this-test"
PARTITIONS = 4
ERRORS = {
    "LookupError": "no rate for XBT",
    "TimeoutError": "the ledger took longer than 5 s",
    "DecodeError": "lines.0.price: Field required",
}
ONCE = Retry(attempts=1)


class Line(BaseModel):
    article: str
    price: float


class Order(BaseModel):
    id: int
    currency: str
    lines: list[Line]
    reference: int = 0


REFERENCE = 2**53 + 1
"""Of each order; JavaScript rounds it."""


def in_euro(record: Record) -> bytes | None:
    """A transform: the value of every order in XBT is in EUR instead."""
    value = record.value or b""
    return value.replace(b"XBT", b"EUR") if b"XBT" in value else None


class Shop:
    """An app that takes orders in EUR, and publishes a receipt of each.

    Attributes:
        runs: The orders on which its handler has run.
        is_down: Whether bills fail.
    """

    def __init__(self, bootstrap: str, group: str, topic: str, *, shows: bool = True) -> None:
        self.topic = topic
        self.runs: list[int] = []
        self.is_down = True
        self.app = App(
            group,
            bootstrap_servers=bootstrap,
            auto_offset_reset="earliest",
            show_keys=shows,
            show_payloads=shows,
        )
        self.app.consume(f"{topic}.orders", retry=ONCE, on_failure=DeadLetter(f"{topic}.dlt"))(self.on_order)
        self.app.consume(f"{topic}.bills", retry=ONCE, on_failure=Park(f"{topic}.park", delay=600))(self.on_bill)

    async def on_order(self, order: Order) -> None:
        self.runs.append(order.id)
        if order.currency != "EUR":
            raise LookupError(f"no rate for {order.currency}")
        await self.app.publish(f"{self.topic}.receipts", {"order": order.id}, key=str(order.id))

    async def on_bill(self, _: Record) -> None:
        if self.is_down:
            raise ConnectionError("the ledger is down")

    def letters(self, total: int) -> Iterator[Message]:
        """Dead letters, those of each partition in the order of their failures; every tenth order lacks a price."""
        names = list(ERRORS)
        for number in range(total):
            name = "DecodeError" if number % 10 == 9 else names[number % 2]
            currency = "EUR" if name == "TimeoutError" else "XBT"
            line = {"article": f"article {number}"} if name == "DecodeError" else {"article": "tea", "price": 2.5}
            value = (
                json.dumps({"id": number, "currency": currency, "lines": [line], "reference": REFERENCE}).encode()
                + b"\r\n"
            )
            original = Record(
                f"{self.topic}.orders", number % PARTITIONS, number, b"customer-%d" % (number % 400), value,
                (("tenant", b"acme" if number % 3 else b"initech"), ("trace", b"\xff\x00")), 1.7e9 + number,
            )  # fmt: skip
            why = failure(number, group=self.app.group_id, error=name, message=ERRORS[name])
            yield dead_letter(f"{self.topic}.dlt", original, why)._replace(partition=number % PARTITIONS)

    async def park_bills(self, kafka: SharedKafka) -> None:
        """Park a key with two bills, which fail while the ledger is down."""
        await kafka.produce(f"{self.topic}.bills", [(b"account-7", b"{}"), (b"account-7", b"{}")], 0)
        await until(lambda: self.app.statistics().handlers[1].parked == 2, self.app.explain)


@contextlib.asynccontextmanager
async def open_shop(kafka: SharedKafka, topic: str, group: str, total: int) -> AsyncIterator[tuple[Shop, str]]:
    """A running shop with dead letters, and the address of its dashboard, which is part of another application."""
    shop = Shop(kafka.bootstrap, group, topic)
    for name in ("orders", "bills", "receipts", "dlt"):
        await kafka.create_topic(f"{topic}.{name}", PARTITIONS, {"retention.ms": "-1"})
    await write(kafka.bootstrap, shop.letters(total))
    api = FastAPI()
    api.mount("/aioshard", dashboard(shop.app, token=TOKEN, transforms=[in_euro]))
    async with shop.app, served(api) as address:
        yield shop, f"{address}/aioshard/"
