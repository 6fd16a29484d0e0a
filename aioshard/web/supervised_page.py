"""The dashboard of several processes: merges their data, and forwards actions to the chosen process."""

import asyncio
import json
from typing import Any

from starlette.routing import BaseRoute

from aioshard.web.actions import Action, RefusedError
from aioshard.web.asking import NoAnswerError, ask_worker
from aioshard.web.page import Source, routes_of
from aioshard.web.processes import document, unknown_process
from aioshard.web.workers import Supervised, WorkerState

__all__ = ["supervised_page"]

_ANSWERS_WITHIN = 2.0
_ACTS_WITHIN = 15.0


def supervised_page(supervised: Supervised, *, token: str | None = None) -> list[BaseRoute]:
    """Return the routes of a supervisor's dashboard; its workers serve dashboards too.

    Args:
        supervised: The supervisor whose workers are shown.
        token: Allows anyone who has it to act; the same as that of the workers. With None the dashboard is read-only.

    Raises:
        SettingsError: The token is too short, or cannot be sent in a header.
    """

    async def look() -> dict[str, Any]:
        processes = await asyncio.gather(*map(_process, supervised.workers()))
        return document(processes, actions=token is not None)

    async def act(action: Action) -> str:
        if action.name == "check" and action.worker is None:
            return "the token is right"
        state = next((one for one in supervised.workers() if one.worker == action.worker), None)
        if state is None:
            names = ", ".join(one.worker for one in supervised.workers())
            raise RefusedError(409, f'there are several processes: "worker" says which one is meant, of {names}')
        return await _forwarded(state, action, token or "")

    return routes_of(Source(look, act), token=token)


async def _process(state: WorkerState) -> dict[str, Any]:
    if state.pid is None:
        return unknown_process(state.worker, state.trouble or "it does not run")
    try:
        answer = await ask_worker(state.socket, "/processes.json", within=_ANSWERS_WITHIN)
        (found,) = json.loads(answer.body)["processes"]
    except NoAnswerError as error:
        return unknown_process(state.worker, state.trouble or f"it does not answer: {error}")
    except (ValueError, KeyError, TypeError):
        return unknown_process(state.worker, "it does not answer as a worker does")
    return {**found, "worker": state.worker}


async def _forwarded(state: WorkerState, action: Action, token: str) -> str:
    """Forward an action to a worker and return its reply."""
    headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    body = json.dumps({"action": action.name, **action.arguments}).encode()
    try:
        answer = await ask_worker(
            state.socket, "/actions", method="POST", headers=headers, body=body, within=_ACTS_WITHIN
        )
        told = json.loads(answer.body)
    except (NoAnswerError, ValueError) as error:
        raise RefusedError(504, f"worker {state.worker} did not answer ({error}); it may do it later") from None
    if answer.status != 200:  # noqa: PLR2004 - HTTP's
        raise RefusedError(answer.status, f"worker {state.worker}: {told.get('error')}")
    return f"worker {state.worker}: {told.get('done')}"
