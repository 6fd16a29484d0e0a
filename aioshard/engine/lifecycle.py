"""The state of a running app, from its start to its stop, and the error that ends it."""

import asyncio

from aioshard.observe import AppState


class Lifecycle:
    """The state of an app, and the error with which it ends if it cannot continue.

    Owned by the event loop; the state is safe to read from any thread.

    Invariants:
        * A failed app stays failed, unless it was draining already: then the drain decides how it ends.
        * `failed` is done at most once, with the first error.
    """

    def __init__(self) -> None:
        """Begin with the state "starting"; needs a running event loop."""
        loop = asyncio.get_running_loop()
        self.state: AppState = "starting"
        self.failed: asyncio.Future[None] = loop.create_future()
        """Done with an exception once the app cannot continue."""
        self.started: asyncio.Future[None] = loop.create_future()
        """Done when the first assignment is complete, or when the app begins to stop."""
        self.stopping = False
        """Whether the app has begun to stop, also after a failure."""

    def begin_running(self) -> None:
        """End the start: the first assignment is complete."""
        self.state = "running"
        self.started.set_result(None)

    def begin_stopping(self) -> bool:
        """Begin to stop: the app is draining, unless it has failed. A start that is still waiting ends.

        Returns:
            Whether the app drains from now on.
        """
        self.stopping = True
        drains = self.state not in ("failed", "draining")
        if drains:
            self.state = "draining"
        if not self.started.done():
            self.started.set_result(None)
        return drains

    def end(self) -> None:
        """Mark the app as stopped, unless it has failed."""
        if self.state != "failed":
            self.state = "stopped"

    def fail(self, error: BaseException) -> None:
        """Mark the app as failed, and raise *error* where it is served."""
        if self.state not in ("draining", "stopped"):
            self.state = "failed"
        if not self.failed.done():
            self.failed.set_exception(error)
            self.failed.exception()  # raised where the app is served; nobody has to retrieve it here
