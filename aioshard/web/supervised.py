"""Health, statistics and metrics of the worker processes of one supervisor, merged into one view.

| path | answer |
| --- | --- |
| `/livez` | 200: the supervisor is alive, and restarts its workers; their problems are in `findings` |
| `/readyz` | 200 when every worker is ready |
| `/statistics.json` | `workers`: the state of each, with its statistics |
| `/explain` | the explanation of each worker, as text or as JSON |
| `/metrics` | those of all workers, with the label `worker` |

Each request queries the workers over their Unix sockets. A worker that does not respond in time is reported as such,
and its metrics are left out.
"""

import asyncio
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Metric, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from aioshard.telemetry.exposition import Collected, encode
from aioshard.web.answers import MISSING, SAFE, probe_answer, wants_json
from aioshard.web.asking import NoAnswerError, WorkerAnswer, ask_worker
from aioshard.web.merged import LABEL, Family, labelled, merged
from aioshard.web.workers import Supervised, WorkerState

__all__ = ["SUPERVISOR", "supervised_application"]

SUPERVISOR = "supervisor"
"""The label `worker` of the supervisor's own process."""

_PROBES_WITHIN = 0.7
"""Seconds that workers get to answer a probe, which itself usually has a timeout of one second."""
_ANSWERS_WITHIN = 2.0
_ESCAPING = re.compile(r";\s*escaping=[\w-]+")


class _Told(NamedTuple):
    """The response of one worker."""

    state: WorkerState
    answer: WorkerAnswer | None
    error: str | None

    @property
    def json(self) -> Any:
        """The JSON object of the response; empty without one."""
        try:
            return json.loads(self.answer.body) if self.answer is not None else {}
        except ValueError:
            return {}

    @property
    def reason(self) -> str:
        """Why the response is missing."""
        return self.state.trouble or self.error or "no answer"


async def _asked(state: WorkerState, target: str, within: float, accept: str = "application/json") -> _Told:
    if state.pid is None:
        return _Told(state, None, None)
    try:
        return _Told(state, await ask_worker(state.socket, target, headers={"accept": accept}, within=within), None)
    except NoAnswerError as error:
        return _Told(state, None, f"it does not answer: {error}")


async def _all(
    supervised: Supervised, target: str, within: float = _ANSWERS_WITHIN, accept: str = "application/json"
) -> list[_Told]:
    return await asyncio.gather(*(_asked(state, target, within, accept) for state in supervised.workers()))


# Probes -------------------------------------------------------------------------------


def _findings(told: Sequence[_Told]) -> list[str]:
    found = []
    for one in told:
        name = f"worker {one.state.worker}"
        if one.state.trouble is not None:
            found.append(f"{name}: {one.state.trouble}")
        elif one.answer is None:
            found.append(f"{name}: {one.reason}")
        found += [f"{name}: {each}" for each in one.json.get("findings", ())]
    return found


def _not_ready(told: Sequence[_Told]) -> Iterator[str]:
    for one in told:
        name = f"worker {one.state.worker}"
        if one.answer is None:
            yield f"{name}: {one.reason}"
        elif one.answer.status != 200:  # noqa: PLR2004 - HTTP's
            yield from (f"{name}: {each}" for each in one.json.get("reasons") or ("it is not ready",))


def _probe_answer(supervised: Supervised, told: Sequence[_Told], reasons: Sequence[str]) -> Response:
    states = [one.json.get("state", "starting") for one in told]
    others = [state for state in states if state != "running"]
    state = "draining" if supervised.draining else others[0] if others else "running"
    return probe_answer(state, reasons, _findings(told))


def _probes(supervised: Supervised) -> list[BaseRoute]:
    async def livez(_: Request) -> Response:
        told = await _all(supervised, "/livez", _PROBES_WITHIN)
        return _probe_answer(supervised, told, [])

    async def readyz(_: Request) -> Response:
        told = await _all(supervised, "/readyz", _PROBES_WITHIN)
        reasons = list(_not_ready(told))
        if supervised.draining:
            reasons.insert(0, "the workers are stopping: what runs is finished, nothing new is taken in")
        return _probe_answer(supervised, told, reasons)

    return [Route("/livez", livez), Route("/readyz", readyz)]


# Views --------------------------------------------------------------------------------


def _views(supervised: Supervised) -> list[BaseRoute]:
    async def statistics(_: Request) -> Response:
        told = await _all(supervised, "/statistics.json")
        workers = [
            {
                "worker": one.state.worker,
                "pid": one.state.pid,
                "restarts": one.state.restarts,
                "trouble": one.state.trouble,
                "error": one.reason if one.answer is None else None,
                "statistics": one.json or None,
            }
            for one in told
        ]
        return JSONResponse({"group_id": supervised.group_id, "workers": workers}, headers=SAFE)

    async def explain(request: Request) -> Response:
        if wants_json(request):
            told = await _all(supervised, "/explain?format=json")
            workers = [
                {
                    "worker": one.state.worker,
                    "error": one.reason if one.answer is None else None,
                    "diagnosis": one.json or None,
                }
                for one in told
            ]
            return JSONResponse({"workers": workers}, headers=SAFE)
        told = await _all(supervised, "/explain?format=text")
        return PlainTextResponse("\n".join(map(_explained, told)), headers=SAFE)

    return [Route("/statistics.json", statistics), Route("/explain", explain)]


def _explained(told: _Told) -> str:
    text = f"{told.reason}\n" if told.answer is None else told.answer.body.decode("utf-8", "replace")
    return f"Worker {told.state.worker}\n{text}" + ("" if text.endswith("\n") else "\n")


# Metrics ------------------------------------------------------------------------------


def _metrics(supervised: Supervised) -> list[BaseRoute]:
    own = CollectorRegistry()
    ProcessCollector(registry=own)

    def page(told: Sequence[_Told], content_type: str) -> str:
        exposed: list[Mapping[str, Family]] = []
        up: dict[str, float] = {}
        for one in told:
            up[one.state.worker] = 0.0
            if one.answer is not None:
                try:
                    exposed.append(labelled(one.answer.body.decode(), one.state.worker))
                except ValueError:
                    continue
                up[one.state.worker] = 1.0
        exposed.append(labelled(encode(own, content_type)[0].decode(), SUPERVISOR))
        of_workers = Collected(_of_workers(supervised.group_id, told, up))
        exposed.append(labelled(encode(of_workers, content_type)[0].decode(), None))
        return merged(exposed, open_metrics=content_type.startswith("application/openmetrics-text"))

    async def metrics(request: Request) -> Response:
        # In the plain character set: with arbitrary characters in names, the label would have no fixed place.
        _, content_type = choose_encoder(_ESCAPING.sub("", request.headers.get("accept", "")))
        told = await _all(supervised, "/metrics", accept=content_type)
        # In a thread: it takes a while with many series.
        text = await asyncio.to_thread(page, told, content_type)
        return Response(text, headers={**SAFE, "content-type": content_type})

    return [Route("/metrics", metrics)]


def _of_workers(group: str, told: Sequence[_Told], up: dict[str, float]) -> list[Metric]:
    labels = ["group", LABEL]
    answered = GaugeMetricFamily(
        "aioshard_worker_up", "1 for a worker whose metrics are here, 0 for one that did not answer.", labels=labels
    )
    restarts = CounterMetricFamily(
        "aioshard_worker_restarts", "How often the supervisor has started the worker again.", labels=labels
    )
    for one in told:
        answered.add_metric([group, one.state.worker], up[one.state.worker])
        restarts.add_metric([group, one.state.worker], one.state.restarts)
    return [answered, restarts]


def supervised_application(supervised: Supervised, routes: Sequence[BaseRoute] = ()) -> Starlette:
    """Return the application that a supervisor serves.

    Args:
        supervised: The supervisor whose workers are queried.
        routes: Additional routes, which take precedence.
    """
    own = [*_probes(supervised), *_views(supervised), *_metrics(supervised)]
    return Starlette(routes=[*routes, *own], exception_handlers=MISSING)
