"""A schema registry that answers as a test says, on a free port of 127.0.0.1."""

import asyncio
import json
from collections import Counter
from typing import Any, Self

NOT_FOUND = {"error_code": 40403, "message": "Schema not found"}


class FakeRegistry:
    """Answers requests for schemas over HTTP, as Confluent's registry does.

    Example:
        async with FakeRegistry({1: '"string"'}) as fake:
            registry = SchemaRegistry(fake.url)
    """

    def __init__(self, schemas: dict[int, str] | None = None, **more: Any) -> None:
        self.schemas = schemas or {}
        """The schemas, by number."""
        self.by_guid: dict[str, str] = {}
        """More schemas, by GUID."""
        self.more = more
        """The fields of every schema besides its text."""
        self.status = 200
        """Another one is the answer to everything, with `body`."""
        self.body: Any = {"error_code": 50001, "message": "out of order"}
        self.requests: Counter[str] = Counter()
        """How often each path was requested."""
        self.logins: set[str] = set()
        """The contents of the header Authorization."""
        self.held = asyncio.Event()
        """While it is not set, nothing is answered."""
        self.held.set()
        self.waiting = asyncio.Event()
        """Set once a request waits for `held`."""
        self.url = ""
        self._more_requested = asyncio.Event()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self.held.set()
        self._server.close()
        await self._server.wait_closed()

    async def requested(self, count: int) -> None:
        """Wait until there have been that many requests."""
        while self.requests.total() < count:
            self._more_requested.clear()
            await self._more_requested.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            path = head.split()[1].partition("?")[0]
            self.requests[path] += 1
            self._more_requested.set()
            self.logins |= {line.partition(": ")[2] for line in head.splitlines() if line.startswith("Authorization")}
            if not self.held.is_set():
                self.waiting.set()
                await self.held.wait()
            status, body = self._answer(path)
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            writer.write(f"HTTP/1.1 {status} said\r\nContent-Length: {len(content)}\r\n".encode())
            writer.write(b"Connection: close\r\n\r\n" + content)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            writer.close()

    def _answer(self, path: str) -> tuple[int, Any]:
        if self.status != 200:
            return self.status, self.body
        number = path.rpartition("/")[2]
        schema = self.by_guid.get(number)
        if path.startswith("/schemas/ids/"):
            schema = self.schemas.get(int(number))
        return (404, NOT_FOUND) if schema is None else (200, {"schema": schema, **self.more})
