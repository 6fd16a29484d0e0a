"""Work on dead letters that takes longer than a request: counting them, a dry run, and sending them back.

A client starts a job, and then polls how far it has come.
"""

import abc
import asyncio
import contextlib
import itertools
import json
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any, ClassVar, Literal, NamedTuple

from aioshard.app import App
from aioshard.dead_letters.audit import audit, positions_as_text
from aioshard.dead_letters.dead_letter import StoredDeadLetter
from aioshard.dead_letters.edits import Transform
from aioshard.dead_letters.filters import Filters
from aioshard.dead_letters.plan import Plan, make_plan
from aioshard.dead_letters.reading import DeadLetterTopic
from aioshard.dead_letters.replaying import Replay, preview
from aioshard.dead_letters.results import Result
from aioshard.dead_letters.sending import SendBack
from aioshard.dead_letters.tries import message_as_object, try_dead_letters
from aioshard.engine.tasks import TaskSet
from aioshard.errors import AioshardError, AuthorizationError, HandlerError
from aioshard.web.authorization import RefusedError

logger = logging.getLogger("aioshard.web")

MOST_FAILURES = 20
"""Maximum number of failed dead letters that a response names."""

State = Literal["reading", "waiting", "running", "done", "stopped", "discarded", "failed"]
"""`waiting` is a plan that waits for a confirmation, and `discarded` one that will not get it."""


class Change(NamedTuple):
    """How dead letters are changed before their handlers run, or before they are sent."""

    transform: Transform | None = None
    name: str | None = None
    """For people: `module:function`, or `a new value`."""


async def find_dead_letter(app: App, topic: str, partition: int, offset: int) -> StoredDeadLetter:
    """Read one dead letter of the app's group.

    Raises:
        RefusedError: There is none, or it belongs to another group.
        TransportError: It cannot be read.
    """
    async with opened(app, topic) as (dead_letter_topic, _):
        dead_letter = await dead_letter_topic.dead_letter(partition, offset)
    if dead_letter is None:
        raise RefusedError(404, f"no dead letter is at {topic}/{partition}/{offset}: it may have been deleted")
    if dead_letter.failure.group != app.group_id:
        raise RefusedError(
            404, f"{dead_letter.at} belongs to group {dead_letter.failure.group!r}, not to {app.group_id!r}"
        )
    return dead_letter


@contextlib.asynccontextmanager
async def opened(app: App, topic: str) -> AsyncIterator[tuple[DeadLetterTopic, bool]]:
    """Open a dead-letter topic with its progress; yield also whether this user may read the progress.

    Raises:
        TransportError: The topic does not exist, or no broker answers.
    """
    async with DeadLetterTopic.opened(app.settings, topic) as dead_letter_topic:
        progress_known = True
        try:
            await dead_letter_topic.fetch_progress()
        except AuthorizationError:
            progress_known = False
        yield dead_letter_topic, progress_known


def indented(value: object) -> str:
    """Return a value as JSON for people: browsers would round numbers with many digits."""
    return json.dumps(value, ensure_ascii=False, indent=2)


# Jobs ---------------------------------------------------------------------------------


class Job(abc.ABC):
    """A job on one dead-letter topic. Its state is changed by its own task, and by `Jobs`."""

    kind: ClassVar[str]
    verb: ClassVar[str]
    """For messages: another client is … them."""

    def __init__(self, app: App, topic: str, who: str) -> None:
        """Describe a job; `Jobs.start` begins it.

        Args:
            app: The app.
            topic: The dead-letter topic.
            who: The sender of the request, for the audit log.
        """
        self.number = 0
        self.topic = topic
        self.state: State = "reading"
        self.error: str | None = None
        self.task: asyncio.Task[Any] | None = None
        self._app = app
        self._who = who
        self._reading: DeadLetterTopic | None = None
        """The topic while it is read, for the progress."""

    @property
    def is_active(self) -> bool:
        """Whether its task has not ended."""
        return self.state in {"reading", "running"}

    async def run_to_end(self) -> None:
        """Run, and set the state to how that ended."""
        try:
            self.state = await self.run()
        except RefusedError as refused:
            self._fail(refused.detail)
        except AioshardError as error:
            if self.task is not None and self.task.cancelling():
                self.state = "stopped"  # the error is how it ended: a handler that was cancelled has not drained
            else:
                self._fail(str(error))
        except Exception as error:
            self._fail(f"an unexpected error: {type(error).__name__}; the log has its traceback")
            raise

    def _fail(self, reason: str) -> None:
        self.state = "failed"
        self.error = reason

    @abc.abstractmethod
    async def run(self) -> State:
        """Do the work, and return the state that follows.

        Raises:
            AioshardError: It has failed.
            RefusedError: It cannot be done.
        """

    def stop(self) -> None:
        """End it early."""
        if self.task is not None:
            self.task.cancel()

    def end(self, task: asyncio.Task[Any]) -> None:
        """Note that its task was cancelled, if it was; perhaps before it began."""
        if task.cancelled():
            self.state = "stopped"

    @abc.abstractmethod
    def content(self) -> dict[str, Any]:
        """Return its own part of the response."""

    def as_object(self) -> dict[str, Any]:
        """Return the job for JSON."""
        reading = self._reading
        return {
            "job": self.number,
            "kind": self.kind,
            "topic": self.topic,
            "state": self.state,
            "error": self.error,
            "read": 0 if reading is None else reading.records_read,
            "offsets": 0 if reading is None else reading.offsets,
            **self.content(),
        }


class Counting(Job):
    """Counts the dead letters that match, by error, handler and topic."""

    kind = "count"
    verb = "counting"

    def __init__(self, app: App, topic: str, who: str, filters: Filters) -> None:
        """Describe a count."""
        super().__init__(app, topic, who)
        self._filters = filters
        self._summary: dict[str, Any] | None = None

    async def run(self) -> State:
        """See `Job.run`."""
        async with opened(self._app, self.topic) as (self._reading, progress_known):
            survey = await self._reading.survey(self._filters)
        self._summary = survey.as_object(progress_known=progress_known)
        return "done"

    def content(self) -> dict[str, Any]:
        """See `Job.content`."""
        return {"summary": self._summary}


class Trying(Job):
    """Runs the handler on one dead letter, in the event loop of the app, without effects on Kafka."""

    kind = "try"
    verb = "trying"

    def __init__(self, app: App, topic: str, who: str, position: tuple[int, int], change: Change) -> None:
        """Describe a dry run."""
        super().__init__(app, topic, who)
        self._position = position
        self._change = change
        self._outcome: dict[str, Any] | None = None

    async def run(self) -> State:
        """See `Job.run`."""
        dead_letter = await find_dead_letter(self._app, self.topic, *self._position)
        self.state = "running"
        audit(
            "try", self.topic, positions_as_text([self._position]), self._who, "its handler runs and publishes nothing"
        )
        trying = try_dead_letters(self._app, [dead_letter], transform=self._change.transform)
        trial = await self._app.run_in_loop(trying, "try a dead letter")
        payload = self._app.settings.show_payloads
        if not trial.tried:
            raise HandlerError("the dry run has ended before its handler: the app is being stopped")
        (tried,) = trial.tried
        outcome = tried.as_object(payload=payload)
        others = trial.unattributed
        self._outcome = {
            **outcome,
            "result_text": indented(outcome.get("result")),
            "hidden": not payload,
            "other_messages": list(map(message_as_object, others)) if payload else len(others),
        }
        return "done"

    def content(self) -> dict[str, Any]:
        """See `Job.content`."""
        partition, offset = self._position
        return {"partition": partition, "offset": offset, "change": self._change.name, "outcome": self._outcome}


class Sending(Job):
    """Sends dead letters back: finds those that match, waits for a confirmation, and sends them.

    Invariants:
        * Only the dead letters that were counted for the confirmation are sent.
    """

    kind = "send"
    verb = "sending back"

    def __init__(self, app: App, topic: str, who: str, filters: Filters, change: Change, *, again: bool) -> None:
        """Describe what to send."""
        super().__init__(app, topic, who)
        self._filters = filters
        self._change = change
        self._again = again
        self._stop = asyncio.Event()
        self._plan: Plan | None = None
        self._planned: dict[str, Any] | None = None
        self._result: Result | None = None
        """That of the run, until it has ended."""
        self._outcome = _outcome_of(Result())

    async def run(self) -> State:
        """Find the dead letters, or send them once the plan is confirmed."""
        async with DeadLetterTopic.opened(self._app.settings, self.topic) as dead_letter_topic:
            if self._plan is None:
                self._reading = dead_letter_topic
                return await self._make_plan(dead_letter_topic)
            return await self._send(dead_letter_topic, self._plan)

    async def _make_plan(self, dead_letter_topic: DeadLetterTopic) -> State:
        await dead_letter_topic.fetch_progress()
        plan = await make_plan(dead_letter_topic, self._filters, again=self._again)
        self._planned = {"selected": len(plan), "topics": dict(plan.topics), "errors": dict(plan.errors)}
        if self._change.transform is not None:
            changes = await preview(dead_letter_topic, plan, self._change.transform)
            self._planned |= {"changed": changes.changed, "left": changes.left_alone, "failed": len(changes.failed)}
        self._plan = plan
        return "waiting"

    async def _send(self, dead_letter_topic: DeadLetterTopic, plan: Plan) -> State:
        run = Replay(
            dead_letter_topic, plan, SendBack(), who=self._who, transform=self._change.transform, stop=self._stop
        )
        self._result = run.result
        try:
            await run.run(self._app.settings)
        finally:
            self._plan = None
            self._outcome = _outcome_of(run.result)
            self._result = None  # it may have many failures
        return "stopped" if run.result.stopped else "done"

    def confirm(self, who: str) -> None:
        """Let the next `run` send what was found."""
        self._who = who
        self.state = "running"

    def stop(self) -> None:
        """End it early: what is being written is completed, and the rest stays due."""
        if self.state == "running":
            self._stop.set()
        else:
            super().stop()

    def forget(self) -> None:
        """Drop a plan that is not wanted."""
        self._plan = None
        self.state = "discarded"

    def content(self) -> dict[str, Any]:
        """See `Job.content`."""
        return {
            "change": self._change.name,
            "planned": self._planned,
            **(self._outcome if self._result is None else _outcome_of(self._result)),
            "stopping": self._stop.is_set(),
        }


def _outcome_of(result: Result) -> dict[str, Any]:
    return {
        "sent": result.done.total(),
        "left": result.left_alone,
        "failed": len(result.failed),
        "failures": [failed.as_object() for failed in result.failed[:MOST_FAILURES]],
    }


# All jobs -----------------------------------------------------------------------------


class Jobs:
    """The latest job of each kind. Owned by the routes of one dashboard.

    Their tasks run in the event loop that serves the routes, and are cancelled when it ends.

    Invariants:
        * Of each kind, at most one is active.
    """

    def __init__(self) -> None:
        """Begin without jobs."""
        self._latest: dict[str, Job] = {}
        self._numbers = itertools.count(1)
        self._tasks = TaskSet(self._crashed)
        self._requests: set[str] = set()
        """Kinds of requests that are being answered."""

    @contextlib.contextmanager
    def only_one(self, kind: str) -> Iterator[None]:
        """Answer at most one request of a kind at a time.

        Raises:
            RefusedError: There is another one.
        """
        if kind in self._requests:
            raise RefusedError(409, f"another client is reading {kind} at the moment: try again when that has ended")
        self._requests.add(kind)
        try:
            yield
        finally:
            self._requests.discard(kind)

    def start(self, job: Job) -> None:
        """Begin a job.

        Raises:
            RefusedError: Another one of its kind is active.
        """
        self._check_idle(job)
        job.number = next(self._numbers)
        self._latest[job.kind] = job
        self._begin(job)

    def confirm(self, number: int, who: str) -> Sending:
        """Send the dead letters of a plan.

        Raises:
            RefusedError: The plan does not wait for that any more.
        """
        job = self._find(number)
        if not isinstance(job, Sending) or job.state != "waiting":
            raise RefusedError(409, f"job {number} does not wait for a confirmation: it is {job.state}")
        job.confirm(who)
        self._begin(job)
        return job

    def stop(self, number: int, who: str) -> Job:
        """End a job early.

        Raises:
            RefusedError: It has been replaced.
        """
        job = self._find(number)
        if isinstance(job, Sending) and job.state == "waiting":
            job.forget()
        elif job.is_active:
            job.stop()
            audit("stop", job.topic, "", who, f"{job.verb} dead letters ends early")
        return job

    def as_object(self) -> dict[str, Any]:
        """Return the jobs for JSON, by kind."""
        return {kind: job.as_object() for kind, job in self._latest.items()}

    def _find(self, number: int) -> Job:
        for job in self._latest.values():
            if job.number == number:
                return job
        raise RefusedError(409, f"job {number} is not the latest one of its kind any more: begin again")

    def _check_idle(self, job: Job) -> None:
        current = self._latest.get(job.kind)
        if current is not None and current.is_active:
            raise RefusedError(
                409, f"another client is {current.verb} dead letters of {current.topic}: stop that, or wait for its end"
            )

    def _begin(self, job: Job) -> None:
        job.task = self._tasks.start(job.run_to_end(), f"{job.kind} dead letters of {job.topic}")
        job.task.add_done_callback(job.end)

    def _crashed(self, name: str, error: BaseException) -> None:
        logger.error("task %r of the dashboard has failed", name, exc_info=error)
