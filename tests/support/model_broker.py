"""A broker that a test scripts: it speaks Kafka's protocol, and is silent, slow, cut or wrong where a rule says so.

    broker = ModelBroker()
    broker.on(METADATA, lambda request: request.reply(throttle_ms=500))

It runs on sockets, or in a `MemoryNetwork` with virtual time. Without a rule, it replies at once, with zeros and empty
arrays for what a reply does not say.
"""

import asyncio
import struct
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from aioshard.kafka.wire.notation import Api, Field, Structure, parse
from aioshard.kafka.wire.requests import ALL, API_VERSIONS, SASL_AUTHENTICATE, SASL_HANDSHAKE

APIS = {api.key: api for api in ALL}
Rule = Callable[["Received"], object]

_HEADER = Structure("Header", parse("key:i2 version:i2 correlation:i4 client:s")).codec(0, flexible=False)


def encode_response(api: Api, version: int, **values: Any) -> bytes:
    """Returns the body of a response; fields without a value are zero, empty or null."""
    return api.encode_response(version, _filled(api.response, values))


def _filled(fields: Iterable[Field], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a value for each field, also in nested structures."""
    filled: dict[str, Any] = {}
    for field in fields:
        value = values.get(field.name)
        if field.kind == "[":
            filled[field.name] = None if field.tag is not None and value is None else [
                _filled(field.fields, item) for item in value or ()
            ]  # fmt: skip
        elif field.fields:
            filled[field.name] = None if value is None and field.kind == "{" else _filled(field.fields, value or {})
        elif value is not None or field.tag is not None:
            filled[field.name] = value
        else:
            filled[field.name] = _zero(field.kind)
    return filled


def _zero(kind: str) -> Any:
    if kind.endswith("*"):
        return []
    return {"s": None, "b": None, "u": uuid.UUID(int=0), "bool": False}.get(kind, 0)


class Received:
    """A request that has arrived, to be answered or not.

    Attributes:
        at: When it arrived, by the clock of the event loop.
        values: Its fields.
    """

    def __init__(self, session: "Session", frame: bytes) -> None:
        header, at = _decode_header(frame)
        self.session = session
        self.at = asyncio.get_running_loop().time()
        self.api = APIS[header["key"]]
        self.version: int = header["version"]
        self.correlation: int = header["correlation"]
        self.client_id: str = header["client"]
        if self.api.is_flexible(self.version):
            assert frame[at] == 0, "no tagged fields"
            at += 1
        self.values = self.api.decode_request(self.version, frame, at)

    def reply(self, **values: Any) -> None:
        """Answers it."""
        self.session.write(self.frame(**values))

    def reply_later(self, seconds: float, **values: Any) -> None:
        """Answers it after some time."""
        asyncio.get_running_loop().call_later(seconds, lambda: self.reply(**values))

    def reply_bytes(self, body: bytes) -> None:
        """Answers it with a body."""
        self.session.write(self.frame_of(body))

    def frame(self, **values: Any) -> bytes:
        """Returns the whole answer, to be written in pieces."""
        return self.frame_of(encode_response(self.api, self.version, **values))

    def frame_of(self, body: bytes) -> bytes:
        """Returns the whole answer with a body."""
        flexible = self.api.is_flexible(self.version) and self.api is not API_VERSIONS
        content = struct.pack(">i", self.correlation) + (b"\0" if flexible else b"") + body
        return struct.pack(">i", len(content)) + content

    def cut(self) -> None:
        """Closes its connection."""
        self.session.close()


def _decode_header(frame: bytes) -> tuple[dict[str, Any], int]:
    header, at = _HEADER.decode(frame, 0)
    return header._asdict(), at


class Session(asyncio.Protocol):
    """The broker's side of a connection.

    Attributes:
        opened_at: When it was opened, by the clock of the event loop.
        is_open: Whether neither side has closed it.
        closed: Set when one has.
    """

    def __init__(self, broker: "ModelBroker") -> None:
        self.broker = broker
        self.opened_at = asyncio.get_running_loop().time()
        self.is_open = True
        self.closed = asyncio.Event()
        self._transport: Any = None
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self.broker.sessions.append(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while self.is_open and len(self._buffer) >= 4:
            (size,) = struct.unpack_from(">i", self._buffer)
            if len(self._buffer) < 4 + size:
                break
            frame = self._buffer[4 : 4 + size]
            self._buffer = self._buffer[4 + size :]
            self.broker.receive(Received(self, frame))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - as the base class
        self.is_open = False
        self.closed.set()

    def write(self, data: bytes) -> None:
        """Sends bytes, unless the connection has ended."""
        if self.is_open:
            self._transport.write(data)

    def close(self) -> None:
        """Closes it."""
        self._transport.close()

    def abort(self) -> None:
        """Closes it without a word."""
        self._transport.abort()

    def stop_reading(self) -> None:
        """Reads nothing more, so that the other side's buffers fill."""
        self._transport.pause_reading()


class ModelBroker:
    """One broker.

    Attributes:
        versions: The versions that it offers, by API.
        features: The finalized features that it reports.
        silent: Whether it reads requests and does nothing else.
        requests: All that arrived, in order.
        sessions: All connections, in order.
        mechanisms: Of SASL.
        lifetime: Seconds after which it cuts a connection that sends a request without a new login; 0 for never.
    """

    def __init__(self, versions: Mapping[Api, tuple[int, int]] | None = None) -> None:
        offered = {api: (api.lowest, api.highest) for api in APIS.values()}
        self.versions: dict[Api, tuple[int, int]] = offered | dict(versions or {})
        self.features: dict[str, int] = {}
        self.silent = False
        self.requests: list[Received] = []
        self.sessions: list[Session] = []
        self.mechanisms: tuple[str, ...] = ("PLAIN", "OAUTHBEARER")
        self.lifetime = 0.0
        self._rules: dict[int, Rule] = {
            API_VERSIONS.key: _report_versions,
            SASL_HANDSHAKE.key: _shake_hands,
            SASL_AUTHENTICATE.key: _log_in,
        }
        self._arrived = asyncio.Event()

    def protocol(self) -> Session:
        """Accepts a connection."""
        return Session(self)

    def on(self, api: Api, rule: Rule) -> None:
        """Handles requests of a kind with *rule* from now on."""
        self._rules[api.key] = rule

    def receive(self, request: Received) -> None:
        """Handles a request."""
        self.requests.append(request)
        arrived, self._arrived = self._arrived, asyncio.Event()
        arrived.set()
        session = request.session
        expired = 0 < self.lifetime < request.at - session.opened_at
        if expired and request.api not in (SASL_HANDSHAKE, SASL_AUTHENTICATE):
            session.close()
        elif not self.silent:
            self._rules.get(request.api.key, _reply)(request)

    def received(self, api: Api) -> list[Received]:
        """Returns the requests of a kind that have arrived."""
        return [request for request in self.requests if request.api is api]

    async def arrival(self, api: Api, count: int = 1) -> Received:
        """Waits until so many requests of a kind have arrived, and returns the last of these."""
        while len(self.received(api)) < count:
            await self._arrived.wait()
        return self.received(api)[count - 1]

    @property
    def open_sessions(self) -> list[Session]:
        """The connections that are open."""
        return [session for session in self.sessions if session.is_open]


def hold(held: list[Received]) -> Rule:
    """A rule that collects requests, to be answered later or never."""
    return held.append


def _reply(request: Received) -> None:
    request.reply()


def _report_versions(request: Received) -> None:
    broker = request.session.broker
    lowest, highest = broker.versions[API_VERSIONS]
    known = lowest <= request.version <= highest
    apis = [
        {"key": api.key, "lowest": first, "highest": last}
        for api, (first, last) in broker.versions.items()
        if known or api is API_VERSIONS
    ]
    features = [{"name": name, "lowest": level, "highest": level} for name, level in broker.features.items()]
    request.reply_bytes(
        encode_response(
            API_VERSIONS,
            request.version if known else 0,
            error=0 if known else 35,
            apis=apis,
            finalized=features or None,
        )
    )


def _shake_hands(request: Received) -> None:
    offered = request.session.broker.mechanisms
    known = request.values.mechanism in offered
    request.reply(error=0 if known else 33, mechanisms=list(offered))


def _log_in(request: Received) -> None:
    request.reply(content=b"", lifetime_ms=int(request.session.broker.lifetime * 1000))
