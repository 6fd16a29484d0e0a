"""Proxies in front of brokers that delay, cut, swallow, hold, strand and change requests and responses.

A proxy reads the header of each request, so a rule may be for one node, one API and one client:

    rule = proxies.hold(api_key=OFFSET_FETCH, client_id="successor*")
    await rule.met.wait()        # such a request has come; `rule.requests` has it
    rule.lift()                  # it continues to the broker now

A request may also arrive after its client has lost the connection, sent it again, and begun something else:

    rule = proxies.strand(api_key=END_TXN)
    await rule.met.wait()        # the proxy has kept it, and cut the connection of its client
    answer = await rule.arrive() # only now the broker has it
"""

import asyncio
import fnmatch
import functools
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Self

PRODUCE, FETCH, LIST_OFFSETS, METADATA, OFFSET_COMMIT, OFFSET_FETCH = 0, 1, 2, 3, 8, 9
FIND_COORDINATOR, JOIN_GROUP, HEARTBEAT, LEAVE_GROUP, SYNC_GROUP, API_VERSIONS = 10, 11, 12, 13, 14, 18
INIT_PRODUCER_ID, ADD_PARTITIONS_TO_TXN, ADD_OFFSETS_TO_TXN, END_TXN, TXN_OFFSET_COMMIT = 22, 24, 25, 26, 28
CONSUMER_GROUP_HEARTBEAT = 68
GROUP_APIS = (OFFSET_COMMIT, OFFSET_FETCH, JOIN_GROUP, HEARTBEAT, LEAVE_GROUP, SYNC_GROUP, CONSUMER_GROUP_HEARTBEAT)
"""All that a member asks its coordinator."""
_FIRST_FLEXIBLE = {INIT_PRODUCER_ID: 2, ADD_OFFSETS_TO_TXN: 3, END_TXN: 3}
"""Versions from which tagged fields follow the correlation id of an answer."""


@dataclass(frozen=True)
class Request:
    """A request on its way to a broker; *frame* is the whole of it without its length."""

    node: int
    api_key: int
    api_version: int
    correlation_id: int
    client_id: str
    frame: bytes = field(repr=False)

    @classmethod
    def parse(cls, node: int, frame: bytes) -> Self:
        """Read the header, whose beginning is the same in all versions."""
        key, version, correlation, length = struct.unpack_from(">hhih", frame)
        return cls(node, key, version, correlation, frame[10 : 10 + max(length, 0)].decode(), frame)


Change = Callable[[Request, bytes], bytes | None]
"""Makes another answer of one, both without their length; None cuts the connection instead."""


@dataclass(eq=False)
class Rule:
    """Something that proxies do to some requests, until it is lifted.

    Attributes:
        requests: All that it has been applied to.
        met: Set when there is one.
    """

    effect: Literal["delay", "cut", "swallow", "hold", "strand", "answer", "reply", "watch"]
    node: int | None
    api_key: int | None
    client_id: str | None
    end: Callable[["Rule"], None]
    seconds: float = 0.0
    change: Change | None = None
    times: int | None = None
    """It is lifted after so many requests."""
    requests: list[Request] = field(default_factory=list)
    met: asyncio.Event = field(default_factory=asyncio.Event)
    lifted: asyncio.Event = field(default_factory=asyncio.Event)
    stranded: "tuple[asyncio.StreamReader, asyncio.StreamWriter] | None" = None
    """The connection to the broker of the request that `strand` has kept."""

    def covers(self, node: int, client_id: str | None, api_key: int | None = None) -> bool:
        """Whether it is for such a request, or without *api_key* for all requests of such a connection."""
        return (
            self.node in (None, node)
            and self.api_key in (None, api_key)
            and (self.client_id is None or fnmatch.fnmatchcase(client_id or "", self.client_id))
        )

    def lift(self) -> None:
        """End it: requests that it holds continue, connections that it has silenced are closed."""
        self.end(self)
        self.lifted.set()

    async def arrive(self) -> bytes:
        """Send the request that `strand` has kept to its broker; return the answer without its length."""
        assert self.stranded is not None, "no request was stranded"
        (request,) = self.requests
        reader, writer = self.stranded
        await _write(writer, request.frame)
        while True:  # earlier requests of the connection are answered too
            answer = await _read(reader)
            if struct.unpack_from(">i", answer) == (request.correlation_id,):
                writer.transport.abort()
                return answer


@dataclass(eq=False)
class _Connection:
    node: int
    task: asyncio.Task[None]
    client_id: str | None = None
    silenced: Rule | None = None
    broker: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
    """The other side; None once a stranded request has taken it over."""


class Proxies:
    """One proxy for each node of a cluster, in the event loop that enters it.

    A rule is for every node, API and client that it does not name; *client_id* is a pattern such as `"member-1*"`.
    The answers that a client waits for on one connection come in order, as those of a broker do.

    Args:
        routes: For each node the port to listen on and that of the broker.
    """

    def __init__(self, routes: Mapping[int, tuple[int, int]]) -> None:
        self._routes = routes
        self._rules: list[Rule] = []
        self._connections: set[_Connection] = set()
        self._stranded: list[Rule] = []
        self._servers: list[asyncio.Server] = []

    async def __aenter__(self) -> Self:
        for node, (port, _) in self._routes.items():
            accept = functools.partial(self._accept, node)
            self._servers.append(await asyncio.start_server(accept, "127.0.0.1", port))
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self._servers:
            server.close()
        self.clear()
        tasks = [connection.task for connection in self._connections]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for rule in self._stranded:
            assert rule.stranded is not None
            rule.stranded[1].transport.abort()

    def delay(
        self, seconds: float, *, node: int | None = None, api_key: int | None = None, client_id: str | None = None
    ) -> Rule:
        """Let requests arrive later."""
        return self._add(Rule("delay", node, api_key, client_id, self._rules.remove, seconds))

    def cut(self, *, node: int | None = None, api_key: int | None = None, client_id: str | None = None) -> Rule:
        """Close connections and accept none; with *api_key* those on which such a request comes."""
        return self._add(Rule("cut", node, api_key, client_id, self._rules.remove))

    def swallow(self, *, node: int | None = None, api_key: int | None = None, client_id: str | None = None) -> Rule:
        """Be a black hole: connections stay open and nothing is answered; with *api_key* from such a request on."""
        return self._add(Rule("swallow", node, api_key, client_id, self._end_silence))

    def hold(self, *, node: int | None = None, api_key: int | None = None, client_id: str | None = None) -> Rule:
        """Keep requests, and what follows them on their connection, until the rule is lifted."""
        return self._add(Rule("hold", node, api_key, client_id, self._rules.remove))

    def strand(self, *, node: int | None = None, api_key: int | None = None, client_id: str | None = None) -> Rule:
        """Keep the next request, and cut the connection of its client; the broker gets it by `Rule.arrive`."""
        return self._add(Rule("strand", node, api_key, client_id, self._rules.remove))

    def answer(
        self,
        change: Change,
        *,
        node: int | None = None,
        api_key: int | None = None,
        client_id: str | None = None,
        times: int | None = None,
    ) -> Rule:
        """Let the broker answer, and the client get another answer or lose the connection; so many *times*."""
        return self._add(Rule("answer", node, api_key, client_id, self._rules.remove, change=change, times=times))

    def reply(
        self,
        change: Change,
        *,
        node: int | None = None,
        api_key: int | None = None,
        client_id: str | None = None,
        times: int | None = None,
    ) -> Rule:
        """Answer in place of the broker, which does not get the request; *change* has no answer of it then."""
        return self._add(Rule("reply", node, api_key, client_id, self._rules.remove, change=change, times=times))

    def watch(self, *, node: int | None = None, api_key: int | None = None, client_id: str | None = None) -> Rule:
        """Change nothing; `Rule.requests` has those that come, unless an earlier rule keeps them."""
        return self._add(Rule("watch", node, api_key, client_id, self._rules.remove))

    def clear(self) -> None:
        """Lift all rules; requests that are stranded stay so."""
        for rule in list(self._rules):
            rule.lift()

    def _add(self, rule: Rule) -> Rule:
        self._rules.append(rule)
        for connection in self._connections:
            if rule.covers(connection.node, connection.client_id):
                if rule.effect == "cut":
                    connection.task.cancel()
                elif rule.effect == "swallow":
                    connection.silenced = rule
        return rule

    def _end_silence(self, rule: Rule) -> None:
        self._rules.remove(rule)
        for connection in self._connections:
            if connection.silenced is rule:
                connection.task.cancel()

    async def _accept(self, node: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connection = _Connection(node, task)
        self._connections.add(connection)
        try:
            if any(rule.effect == "cut" and rule.covers(node, None) for rule in self._rules):
                return
            answers, requests = await asyncio.open_connection("127.0.0.1", self._routes[node][1])
            connection.broker = answers, requests
            arrived: asyncio.Queue[tuple[float, Request]] = asyncio.Queue()
            awaited: dict[int, tuple[Rule, Request]] = {}
            async with asyncio.TaskGroup() as group:  # the first that ends raises, and so ends the others
                group.create_task(_read_requests(connection, reader, arrived))
                group.create_task(self._pass_requests(connection, arrived, requests, writer, awaited))
                group.create_task(_pass_answers(connection, answers, writer, awaited))
        except* (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # a side has closed it, or a rule has
        finally:
            self._connections.discard(connection)
            writer.transport.abort()
            if connection.broker is not None:
                connection.broker[1].transport.abort()

    def _strand(self, rule: Rule, connection: _Connection) -> None:
        """Take the broker's side of a connection out of it, for a request that arrives later."""
        rule.stranded, connection.broker = connection.broker, None
        self._stranded.append(rule)
        rule.lift()  # the client sends the request again, and that one passes

    async def _pass_requests(
        self,
        connection: _Connection,
        arrived: asyncio.Queue[tuple[float, Request]],
        writer: asyncio.StreamWriter,
        client: asyncio.StreamWriter,
        awaited: dict[int, tuple[Rule, Request]],
    ) -> None:
        while True:
            at, request = await arrived.get()
            is_answered = False
            for rule in [rule for rule in self._rules if rule.covers(request.node, request.client_id, request.api_key)]:
                rule.requests.append(request)
                rule.met.set()
                if len(rule.requests) == rule.times:
                    rule.lift()
                if rule.effect == "answer":
                    awaited[request.correlation_id] = rule, request
                elif rule.effect == "reply":
                    await _reply(rule, request, client)
                    is_answered = True
                else:
                    await self._delay(rule, connection, at)
            if connection.silenced is None and not is_answered:
                await _write(writer, request.frame)

    async def _delay(self, rule: Rule, connection: _Connection, arrived_at: float) -> None:
        """Let a rule keep a request of a connection for a while, or for good."""
        match rule.effect:
            case "delay":
                await asyncio.sleep(arrived_at + rule.seconds - asyncio.get_running_loop().time())
            case "cut":
                raise ConnectionAbortedError
            case "swallow":
                connection.silenced = rule
            case "hold":
                await rule.lifted.wait()
            case "strand":
                self._strand(rule, connection)
                raise ConnectionAbortedError


async def _reply(rule: Rule, request: Request, client: asyncio.StreamWriter) -> None:
    assert rule.change is not None
    answer = rule.change(request, b"")
    if answer is None:
        raise ConnectionAbortedError
    await _write(client, answer)


async def _read_requests(
    connection: _Connection, reader: asyncio.StreamReader, arrived: asyncio.Queue[tuple[float, Request]]
) -> None:
    while True:
        request = Request.parse(connection.node, await _read(reader))
        connection.client_id = request.client_id
        arrived.put_nowait((asyncio.get_running_loop().time(), request))


async def _pass_answers(
    connection: _Connection,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    awaited: dict[int, tuple[Rule, Request]],
) -> None:
    while True:
        frame: bytes | None = await _read(reader)
        assert frame is not None
        (correlation_id,) = struct.unpack_from(">i", frame)
        if correlation_id in awaited:
            rule, request = awaited.pop(correlation_id)
            assert rule.change is not None
            frame = rule.change(request, frame)
            if frame is None:
                raise ConnectionAbortedError
        if connection.silenced is None:
            await _write(writer, frame)


async def _read(reader: asyncio.StreamReader) -> bytes:
    (length,) = struct.unpack(">i", await reader.readexactly(4))
    return await reader.readexactly(length)


async def _write(writer: asyncio.StreamWriter, frame: bytes) -> None:
    writer.write(struct.pack(">i", len(frame)) + frame)
    await writer.drain()


def code_after_throttle(request: Request, answer: bytes) -> int:
    """Return the error code of an answer in which it follows the throttle time, as it does after EndTxn."""
    flexible = request.api_version >= _FIRST_FLEXIBLE[request.api_key]
    (code,) = struct.unpack_from(">h", answer, 4 + flexible + 4)
    return int(code)
