"""Run the DBOS recipe in a separate process, because DBOS exists once in a process and starts threads.

The argument says what happens to the record: `retried` fails the first attempt after its workflow has started, `killed`
ends the process in the second step, and `restarted` gets the same record in the next process. Each event becomes a line
in `events.txt`.
"""

import asyncio
import os
import sys
from pathlib import Path

from dbos import DBOS, WorkflowHandleAsync

from aioshard import App, CallNext, Context, Record
from aioshard.testing import TestClient
from tests.project.docs.recipes import load

KILLED = 9
ORDER = {"id": 7}


def note(event: str) -> None:
    with Path("events.txt").open("a") as file:
        print(event, file=file)


async def scenario(app: App, ending: str) -> None:
    @app.middleware
    async def watch(record: Record, context: Context, call_next: CallNext) -> object:
        note(f"attempt {context.attempt}")
        await call_next(record, context)
        if ending == "retried" and context.attempt == 1:
            raise ConnectionError("after the workflow has started")
        return None

    async with TestClient(app) as client:
        record = await client.publish("orders", ORDER, partition=0)
        await client.settle()
        workflow: WorkflowHandleAsync[None] = await DBOS.retrieve_workflow_async(
            f"{record.topic}/{record.partition}/{record.offset}"
        )
        await workflow.get_result()
        note(f"{len(await DBOS.list_workflows_async())} workflow")


def main(ending: str) -> None:
    recipe = load("Durable workflows: DBOS")

    def print_or_die(step: str, order: int) -> None:
        if ending == "killed" and step == "ship":
            os._exit(KILLED)
        note(f"{step} {order}")

    recipe["print"] = print_or_die
    asyncio.run(scenario(recipe["app"], ending))


if __name__ == "__main__":
    main(*sys.argv[1:])
