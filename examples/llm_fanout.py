"""Many concurrent calls to a slow HTTP API, within its limits: a language model classifies customer reviews.

The API is like OpenAI's: `POST /chat/completions`, 429 after too many calls, sometimes a 500. Reviews do not depend on
each other, so none waits for another. A review that cannot be classified becomes a dead letter; the others continue.

Needs `httpx`.
"""

import contextlib
import os
from collections.abc import AsyncIterator

import httpx
from pydantic import BaseModel

from aioshard import App, CircuitBreaker, Context, DeadLetter, Limit, Retry

API = os.environ.get("LLM_API", "http://localhost:11434/v1")
TOKEN = os.environ.get("LLM_TOKEN", "")
MODEL = os.environ.get("LLM_MODEL", "llama3.2")

CONCURRENCY = 64  # calls at a time
PER_SECOND = 40  # for a single process; the API allows 50. With two processes, use 20 each
PROMPT = "Is this review positive, negative or neutral? Answer with that one word."
CLASSES = {"positive", "negative", "neutral"}
AGAIN = {408, 409, 425, 429}  # and everything from 500 on: the same request may succeed later


class Review(BaseModel):
    id: str
    text: str


class RefusedError(Exception):
    """The API refuses the request itself, so another attempt would be refused too."""


@contextlib.asynccontextmanager
async def resources(_: App) -> AsyncIterator[httpx.AsyncClient]:
    """One client for all calls: it reuses connections, and has one for each concurrent call."""
    limits = httpx.Limits(max_connections=CONCURRENCY, max_keepalive_connections=CONCURRENCY)
    headers = {"Authorization": f"Bearer {TOKEN}"} if TOKEN else {}
    async with httpx.AsyncClient(base_url=API, headers=headers, limits=limits, timeout=50) as client:
        yield client


app = App(
    "reviews",
    bootstrap_servers="localhost:9092",
    auto_offset_reset="earliest",
    drain_timeout=60,  # as long as an attempt may take, also during a shutdown or a rebalance
    rebalance_timeout=75,
    shutdown_timeout=70,
    resources=resources,
)


@app.consume(
    "reviews",
    shard_by="record",
    concurrency=CONCURRENCY,
    timeout=60,  # of an attempt
    limit=Limit("llm", PER_SECOND, burst=5),  # every attempt counts, including retries
    retry=Retry(attempts=6, initial=1, maximum=30, give_up_on=(RefusedError,)),
    on_failure=DeadLetter("reviews.dlt", breaker=CircuitBreaker(window=50)),
)
async def on_review(review: Review, context: Context) -> None:
    client: httpx.AsyncClient = context.state
    answer = await client.post(
        "/chat/completions",
        json={
            "model": MODEL,
            "temperature": 0,
            "messages": [{"role": "system", "content": PROMPT}, {"role": "user", "content": review.text}],
        },
        # If the API supports it, a call that is repeated after a crash is not charged twice.
        headers={"Idempotency-Key": context.idempotency_key},
    )
    if answer.is_client_error and answer.status_code not in AGAIN:
        raise RefusedError(f"{answer.status_code} {answer.text[:200]}")
    answer.raise_for_status()
    word = answer.json()["choices"][0]["message"]["content"].strip(" .\n").lower()
    if word not in CLASSES:
        raise ValueError(f"the model answered {word[:50]!r}")  # another attempt asks the model again
    # A crash may publish it twice: readers drop duplicates by the id.
    await context.publish("reviews.classified", {"id": review.id, "class": word}, key=context.record.key)


if __name__ == "__main__":
    app.run()
