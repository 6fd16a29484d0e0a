"""What ties a process to the one that started it: a pair of sockets, one end in each.

The parent asks for a drain by closing its direction, and so does its end, however it comes. So a drain is asked for
once, whatever signals the processes get beside it, and no process is left behind. The child tells on the way out how it
ended, which an exit code says only in part.
"""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Self

import click

__all__ = ["MARGIN", "Child", "Ending", "Tether"]

MARGIN = 10.0
"""Seconds beyond `shutdown_timeout` after which a process that was to end is ended by force."""
_IMPORTS_WITHIN = 60.0
_LONGEST = 64 * 1024
_TELLS_WITHIN = 1.0
_LOOKS_EVERY = 0.1


class Ending(NamedTuple):
    """How a child ended."""

    code: int
    """Its exit code; the negative number of the signal that killed it."""
    error: str | None
    """Name of the error's class, where it told."""
    message: str
    """What it told of it; empty where it told nothing."""


# In the child -------------------------------------------------------------------------------


class Tether:
    """The child's end.

    Args:
        fd: The socket that the parent has handed down.
    """

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)  # noqa: FBT003 - positional only
        self._socket = socket.socket(fileno=fd)
        self._parent = os.getppid()
        self.within = _IMPORTS_WITHIN
        """Seconds that a drain may take."""

    @property
    def orphaned(self) -> bool:
        """Whether the parent is gone."""
        return os.getppid() != self._parent

    def watch(self, on_end: Callable[[], None], leave: Callable[[], object]) -> None:
        """Have a thread wait for the parent's wish, or its end: a handler may block the event loop.

        Args:
            on_end: Called once, in that thread.
            leave: Called `within` and a margin later, when this process still is there.
        """

        def wait() -> None:
            with contextlib.suppress(OSError):
                while self._socket.recv(_LONGEST):
                    pass
            on_end()
            since = time.monotonic()
            while time.monotonic() < since + self.within + MARGIN:
                time.sleep(1.0)
            leave()

        threading.Thread(target=wait, name="tether", daemon=True).start()

    def tell(self, error: Exception) -> None:
        """Tell the parent why this process ends."""
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        self._send({"error": type(error).__name__, "message": message[: _LONGEST // 8]})

    async def tell_member(self, member: Callable[[], str]) -> None:
        """Tell the parent the id of this member, each time that it is another one; without end."""
        told = ""
        while True:
            if (now := member()) != told:
                told = now
                self._send({"member": now})
            await asyncio.sleep(_LOOKS_EVERY)

    def _send(self, told: Mapping[str, str]) -> None:
        with contextlib.suppress(OSError):  # it is gone
            self._socket.sendall(json.dumps(told).encode() + b"\n")


# In the parent ------------------------------------------------------------------------------


class Child:
    """An `aioshard run` that this process has started. Owned by one event loop."""

    def __init__(self, process: asyncio.subprocess.Process, end: socket.socket) -> None:
        self._process = process
        self._end = end
        self._told = Ending(0, None, "")
        self.pid = process.pid
        self.member = ""
        """The id of the member of the group that it is or was last, as far as it told."""
        self._listening = asyncio.create_task(self._listen(), name=f"listen to process {process.pid}")

    @classmethod
    async def start(
        cls, arguments: Sequence[str], variables: Mapping[str, str] | None = None, *, aside: bool = False
    ) -> Self:
        """Start `aioshard run` with these arguments.

        Args:
            arguments: Behind `run`.
            variables: Added to the environment.
            aside: Away from the terminal: it hears no Ctrl-C and cannot read.

        Raises:
            OSError: The system starts no more processes now.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "aioshard", "run", *arguments, "--tether", str(theirs.fileno())),
                    env={**os.environ, **(variables or {})},
                    stdin=subprocess.DEVNULL if aside else None,
                    pass_fds=[theirs.fileno()],
                    process_group=0 if aside else None,
                )
        except BaseException:
            ours.close()
            raise
        ours.setblocking(False)  # noqa: FBT003 - positional only
        return cls(process, ours)

    def drain(self) -> None:
        """Ask it to drain and end; returns at once, and does nothing the second time."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_WR)

    def kill(self) -> None:
        """End it now."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def ended(self) -> Ending:
        """Wait for its end; to be called once."""
        code = await self._process.wait()
        # What it said is there already. That nothing more comes is not known while its own children hold the socket.
        await asyncio.wait([self._listening], timeout=_TELLS_WITHIN)
        self._listening.cancel()
        await asyncio.wait([self._listening])
        self._end.close()
        return self._told._replace(code=code)

    async def _listen(self) -> None:
        loop, rest = asyncio.get_running_loop(), b""
        with contextlib.suppress(OSError):
            while more := await loop.sock_recv(self._end, _LONGEST):
                *lines, rest = (rest + more).split(b"\n")
                for line in lines:
                    told = json.loads(line)
                    self.member = told.get("member", self.member)
                    if "error" in told:
                        self._told = Ending(0, told["error"], told["message"])
