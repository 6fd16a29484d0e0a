"""One connection to a broker: versions, login, frames, and the requests in flight.

A broker reads the next request of a connection when it has answered the one before. So only the oldest request in
flight can be late; those behind it wait in the same line.
"""

import asyncio
import functools
import importlib.metadata
import logging
import math
import re
import socket
import struct
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, cast

from aioshard.kafka.wire.addresses import Address, Addresses
from aioshard.kafka.wire.errors import (
    BrokerError,
    ConnectionLostError,
    RequestTimedOutError,
    UnexpectedResponseError,
    UnsupportedVersionError,
)
from aioshard.kafka.wire.notation import Api, MalformedMessageError, Request, Structure, parse
from aioshard.kafka.wire.options import ConnectionOptions
from aioshard.kafka.wire.requests import API_VERSIONS, METADATA, OLDEST_BROKER
from aioshard.kafka.wire.sasl import log_in

logger = logging.getLogger("aioshard.kafka.wire")

CLOSE_GRACE: Final = 1.0
"""Seconds for the other side to take part in closing."""
MAX_FRAME: Final = 256 * 1024 * 1024
"""Bytes of the largest response. Anything larger is not from Kafka: a port for HTTP seems to announce 1.2 GB."""

_LAST_LOOK = 0.05
"""Seconds for a response that waits unread: if a protocol blocks uvloop, timers run before sockets are read."""
_KEEP_ALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPALIVE": 60, "TCP_KEEPINTVL": 20, "TCP_KEEPCNT": 3}
"""Options of the socket. Load balancers drop a connection silently after 4 to 6 minutes without a packet."""
_NOT_OFFERED = (0, -1)
_UNSUPPORTED_VERSION = 35
_UNSUPPORTED = _UNSUPPORTED_VERSION.to_bytes(2, "big")
_LENGTH = struct.Struct(">i")
_REQUEST_HEADER = Structure("RequestHeader", parse("key:i2 version:i2 correlation:i4 client:s")).codec(
    0, flexible=False
)
"""The same in flexible versions, but for the tagged fields that follow."""
_RESPONSE_HEADER = Structure("ResponseHeader", parse("correlation:i4"))


class _InFlight:
    """A request that was sent and not answered; its future is cancelled if nobody waits for the answer."""

    __slots__ = ("api", "due", "looked", "response", "timeout", "version")

    def __init__(self, api: Api, version: int, response: "asyncio.Future[Any]", timeout: float | None) -> None:
        self.api = api
        self.version = version
        self.response = response
        self.timeout = timeout
        self.due: float | None = None
        """When the response is overdue; None until the request is first in line."""
        self.looked = False


class Connection(asyncio.Protocol):
    """One connection to a broker. Use `Connection.open`, from one event loop.

    Invariants:
        * Every request ends: with its response, or with an error when the connection ends.
        * A response is matched by its correlation id. One that matches no request closes the connection.
        * The response to a cancelled request is skipped, and disturbs no other.
        * The time of a request begins when it is first in line, and when the broker does not throttle us (KIP-219).

    Attributes:
        address: The name and port of the broker.
        features: The finalized features of the cluster with their levels; empty if the broker has none.
        lifetime: Seconds after the login at which the broker wants another one (KIP-368); infinite if it does not.
        logged_in_at: When the login began, by the clock of the event loop.
        last_used: When something was sent or received last, by the same clock.
        ended: Done when the socket is closed.
    """

    def __init__(self, host: str, port: int, options: ConnectionOptions) -> None:
        self.address = f"{host}:{port}"
        self.features: Mapping[str, int] = MappingProxyType({})
        self.lifetime = math.inf
        self._loop = asyncio.get_running_loop()
        self.logged_in_at = self._loop.time()
        self.last_used = self.logged_in_at
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._host = host
        self._options = options
        self._versions: dict[int, tuple[int, int]] = {API_VERSIONS.key: (0, API_VERSIONS.highest)}
        self._transport: asyncio.Transport | None = None
        self._why_lost: str | None = None
        self._cause_of_loss: BaseException | None = None
        self._kind_of_loss = ConnectionLostError
        self._retired = False
        self._answered = False
        # Requests
        self._correlation = 0
        self._in_flight: dict[int, _InFlight] = {}
        self._asking = 0
        self._turn = asyncio.Lock()
        self._sendable = asyncio.Event()
        self._sendable.set()
        self._write_paused = False
        self._throttled_until = 0.0
        self._throttle_timer: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None
        # Frames
        self._pieces: list[bytes] = []
        self._buffered = 0
        self._needed = _LENGTH.size
        self._received_at = 0.0

    @classmethod
    async def open(
        cls, host: str, port: int, options: ConnectionOptions, *, timeout: float, addresses: Addresses | None = None
    ) -> "Connection":
        """Connect, learn the versions that the broker speaks, and log in.

        Args:
            host: The name of the broker.
            port: Its port.
            options: TLS and credentials.
            timeout: Seconds for everything.
            addresses: The addresses behind the name, with the experience of earlier attempts.

        Raises:
            ConnectionLostError: The broker was not reached, or ended the connection. The cause is an `ssl.SSLError`,
                another `OSError`, or a `TimeoutError`; without one, the broker has closed the connection.
            AuthenticationFailedError: The broker rejected the credentials.
            UnsupportedVersionError: The broker is too old.
            BrokerError: The broker answered with another error code.
        """
        deadline = asyncio.get_running_loop().time() + timeout
        known = addresses or Addresses(host, port)
        connection, address = await known.first(functools.partial(cls._connect, host, port, options), _discard, timeout)
        try:
            async with asyncio.timeout_at(deadline):
                if options.uses_sasl:
                    connection.logged_in_at = asyncio.get_running_loop().time()
                    connection.lifetime = await log_in(connection.send, options, host) or math.inf
        except BaseException as error:
            known.failed(address)
            connection.abort()
            if isinstance(error, TimeoutError):
                raise ConnectionLostError(f"{host}:{port} did not finish the login within {timeout:g} s") from error
            raise
        logger.debug("connected to %s at %s", connection.address, address.host)
        return connection

    @classmethod
    async def _connect(
        cls, host: str, port: int, options: ConnectionOptions, address: Address
    ) -> "tuple[Connection, Address]":
        """Connect to one address, and learn the versions that its broker speaks."""
        connection = cls(host, port, options)
        tls: dict[str, Any] = {}
        if options.uses_tls:
            tls = {"ssl": options.ssl_context, "server_hostname": host, "ssl_shutdown_timeout": CLOSE_GRACE}
        try:
            await connection._loop.create_connection(
                lambda: connection, address.host, address.port, family=address.family, **tls
            )
            await connection._learn_versions()
        except BaseException:
            connection.abort()
            raise
        return connection, address

    async def _learn_versions(self) -> None:
        """Ask in the newest version, then in the one that a broker offers which does not know it."""
        request = api_versions()
        response = await self.send(request)
        if response.error == _UNSUPPORTED_VERSION:
            offered = [api.highest for api in response.apis or () if api.key == API_VERSIONS.key]
            response = await self.send(request.up_to(min([API_VERSIONS.highest - 1, *(offered or [0])])))
        if response.error:
            raise BrokerError(
                response.error, f"{self.address} refused ApiVersions: error code {response.error}", retriable=True
            )
        if not response.apis:
            raise ConnectionLostError(f"{self.address} reports no API versions; it may be starting")
        self._versions = {api.key: (api.lowest, api.highest) for api in response.apis}
        self.features = MappingProxyType({feature.name: feature.highest for feature in response.finalized or ()})
        self._require_version(METADATA, METADATA.highest)

    # State ------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether requests can be sent."""
        return self._transport is not None and self._why_lost is None and not self._transport.is_closing()

    @property
    def is_busy(self) -> bool:
        """Whether a request is in flight, or waits to be sent."""
        return bool(self._in_flight) or self._asking > 0

    @property
    def in_flight(self) -> int:
        """The number of requests that were sent and not answered, also cancelled ones."""
        return len(self._in_flight)

    def __repr__(self) -> str:
        state = "open" if self.is_open else "closed"
        return f"Connection({self.address}, {state}, {len(self._in_flight)} in flight)"

    # Requests ---------------------------------------------------------------------------------

    async def ask(self, request: Request, timeout: float | None = None, *, held: bool = False) -> Any:
        """Send a request when it may be sent, in the order of the calls, and return the response.

        Args:
            request: The request.
            timeout: Seconds for the response once the request is first in line; None for no limit.
            held: Whether the broker may hold the request for long. The broker reads nothing behind it, so the
                connection is closed if the call is cancelled.

        Raises:
            RequestTimedOutError: The response is overdue, and the connection was closed.
            ConnectionLostError: The connection ended.
            UnsupportedVersionError: The broker speaks no version of the request that we speak.
        """
        self._asking += 1
        try:
            async with self._turn:
                await self._sendable.wait()
                response = self.send(request, timeout)
            try:
                return await response
            finally:
                if held and response.cancelled():
                    self.abort()
        finally:
            self._asking -= 1
            self._close_if_retired()

    def send(self, request: Request, timeout: float | None = None) -> "asyncio.Future[Any]":
        """Send a request now, in the newest version that both sides speak, and return the future response.

        Raises:
            ConnectionLostError: The connection is not open.
            UnsupportedVersionError: The broker speaks no version of the request that we speak.
            KeyError: A field of the version has no value.
        """
        api, values, most = request
        version = self._require_version(api, most)
        if self._transport is None or self._why_lost is not None:
            raise self._loss()
        self._correlation = (self._correlation + 1) & 0x7FFF_FFFF
        frame = bytearray(_LENGTH.size)
        header = {
            "key": api.key, "version": version, "correlation": self._correlation, "client": self._options.client_id
        }  # fmt: skip
        _REQUEST_HEADER.encode(frame, header)
        if api.is_flexible(version):
            frame.append(0)
        frame += api.encode(version, values)
        _LENGTH.pack_into(frame, 0, len(frame) - _LENGTH.size)
        try:
            self._transport.write(frame)
        except (RuntimeError, OSError) as error:  # the former is uvloop's error for a transport that was lost
            self._end(f"the connection to {self.address} is lost: {error}", error)
            raise self._loss() from error
        response: asyncio.Future[Any] = self._loop.create_future()
        self._in_flight[self._correlation] = _InFlight(api, version, response, timeout)
        self.last_used = self._loop.time()
        self._limit_oldest()
        return response

    def newest_version(self, api: Api) -> int:
        """Return the newest version of a request that both sides speak; -1 if there is none."""
        return self._newest_version(api, api.highest)

    def _newest_version(self, api: Api, most: int) -> int:
        lowest, highest = self._versions.get(api.key, _NOT_OFFERED)
        version = min(api.highest, highest, most)
        if version == api.skipped:
            version -= 1
        return version if version >= max(api.lowest, lowest) else -1

    def _require_version(self, api: Api, most: int) -> int:
        """Return the newest version of a request that both sides speak.

        Raises:
            UnsupportedVersionError: There is none.
        """
        version = self._newest_version(api, most)
        if version >= 0:
            return version
        lowest, highest = self._versions.get(api.key, _NOT_OFFERED)
        offered = f"offers its versions {lowest} to {highest}" if highest >= lowest else "does not offer it"
        raise UnsupportedVersionError(
            f"{self.address} speaks no version of {api.name} that aioshard needs: it needs {api.lowest} to "
            f"{min(api.highest, most)}, and the broker {offered}. aioshard supports Kafka {OLDEST_BROKER} and newer"
        )

    def _limit_oldest(self) -> None:
        """Begin the time of the oldest request in flight if it has not begun."""
        oldest = next(iter(self._in_flight.values()), None)
        if oldest is None or oldest.timeout is None:
            return
        if oldest.due is None:
            oldest.due = max(self._loop.time(), self._throttled_until) + oldest.timeout
        if self._timer is None or self._timer.when() > oldest.due:
            self._set_timer(oldest.due)

    def _set_timer(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(due, self._check_oldest)

    def _check_oldest(self) -> None:
        """Close the connection if the response to the oldest request is overdue."""
        self._timer = None
        oldest = next(iter(self._in_flight.values()), None)
        if oldest is None or oldest.due is None or oldest.timeout is None:
            return
        now = self._loop.time()
        if self._buffered and self._received_at + oldest.timeout > oldest.due:
            # A large response is arriving over a slow line.
            oldest.due = self._received_at + oldest.timeout
            oldest.looked = False
        if now < oldest.due:
            self._set_timer(oldest.due)
        elif not oldest.looked:
            oldest.looked = True
            self._set_timer(now + _LAST_LOOK)
        else:
            text = f"{self.address} did not answer {oldest.api.name} within {oldest.timeout:g} s"
            if not oldest.response.done():
                oldest.response.set_exception(RequestTimedOutError(text))
            self._end(f"the connection to {self.address} was closed: {text}")

    # Responses --------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Collect the pieces of a response, and handle every complete one."""
        if self._why_lost is not None:
            return
        self._pieces.append(data)
        self._buffered += len(data)
        self._received_at = self._loop.time()
        if self._buffered < self._needed:
            return
        received = data if len(self._pieces) == 1 else b"".join(self._pieces)
        at = 0
        self._needed = _LENGTH.size
        while len(received) - at >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(received, at)
            if not _LENGTH.size <= size <= MAX_FRAME:
                self._end(self._not_kafka(received[at:]), kind=UnexpectedResponseError)
                return
            begin = at + _LENGTH.size
            if len(received) < begin + size:
                self._needed = _LENGTH.size + size
                break
            at = begin + size
            if at == len(received) and begin == _LENGTH.size:
                self._handle(received, begin)  # the common case: without a copy
            else:
                self._handle(received[begin:at], 0)
            if self._why_lost is not None:
                return
        rest = received[at:]
        self._pieces = [rest] if rest else []
        self._buffered = len(rest)

    def _not_kafka(self, received: bytes) -> str:
        (size,) = _LENGTH.unpack_from(received)
        guess = ""
        if received.startswith(b"HTTP"):
            guess = " It looks like HTTP."
        elif received.startswith((b"\x15\x03", b"\x16\x03")):
            guess = (
                f" It looks like TLS; security_protocol is {self._options.security_protocol}, "
                "the listener may expect another one."
            )
        return (
            f"{self.address} announced a response of {size:,} bytes: "
            f"something other than Kafka may answer there.{guess}"
        )

    def _handle(self, frame: bytes, at: int) -> None:
        """Handle one response, which begins at *at*."""
        (correlation,) = _LENGTH.unpack_from(frame, at)
        request = self._in_flight.pop(correlation, None)
        if request is None:
            text = f"{self.address} answered request {correlation}, which was not sent"
            self._end(text, kind=UnexpectedResponseError)
            return
        self._answered = True
        self.last_used = self._received_at
        try:
            if request.response.done():
                throttle = _skipped(request, frame, at)
            else:
                response = _decoded(request, frame, at)
                throttle = getattr(response, "throttle_ms", None) or 0
                request.response.set_result(response)
        except MalformedMessageError as error:
            text = f"{self.address} answered {request.api.name} with something damaged: {error}"
            if not request.response.done():
                request.response.set_exception(UnexpectedResponseError(text))
            self._end(f"the connection to {self.address} was closed: {text}", error)
            return
        if throttle > 0:
            self._throttle(throttle)
        self._limit_oldest()
        self._close_if_retired()

    def _throttle(self, milliseconds: int) -> None:
        """Send nothing for a while: the broker does not read from the connection until then (KIP-219)."""
        self._throttled_until = max(self._throttled_until, self._loop.time() + milliseconds / 1000)
        if self._throttle_timer is not None:
            self._throttle_timer.cancel()
        self._throttle_timer = self._loop.call_at(self._throttled_until, self._end_throttle)
        self._sendable.clear()

    def _end_throttle(self) -> None:
        self._throttle_timer = None
        if not self._write_paused:
            self._sendable.set()

    def pause_writing(self) -> None:
        """Let requests wait: the buffer of the transport is full."""
        self._write_paused = True
        self._sendable.clear()

    def resume_writing(self) -> None:
        """Let requests be sent again."""
        self._write_paused = False
        if self._throttle_timer is None:
            self._sendable.set()

    # End --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport, and let the kernel probe an idle connection."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's has no base class
        if self._why_lost is not None:  # closed while the connection was being made
            self._transport.abort()
            return
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEP_ALIVE.items():
                if hasattr(socket, name):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail all requests in flight."""
        if exc is None:
            text = f"{self.address} closed the connection"
        else:
            text = f"the connection to {self.address} is lost: {str(exc) or type(exc).__name__}"
        self._end(text if self._answered else f"{text} before it answered", exc)
        if not self.ended.done():
            self.ended.set_result(None)

    def retire(self) -> None:
        """Close as soon as nobody waits for a response; the owner sends nothing more."""
        self._retired = True
        self._close_if_retired()

    def _close_if_retired(self) -> None:
        if self._retired and not self.is_busy:
            self.close()

    def close(self) -> None:
        """Close the connection in order; requests in flight fail. It may be called at any time, and again."""
        self._end(f"the connection to {self.address} was closed", orderly=True)

    def abort(self) -> None:
        """Close the connection immediately, also when `close` waits for the other side."""
        self._end(f"the connection to {self.address} was closed")
        if self._transport is not None:
            self._transport.abort()

    async def closed(self) -> None:
        """Wait until the socket is closed, at most `CLOSE_GRACE`."""
        try:
            await asyncio.wait([self.ended], timeout=CLOSE_GRACE)
        finally:
            self.abort()

    def _end(
        self,
        why: str,
        cause: BaseException | None = None,
        *,
        kind: type[ConnectionLostError] = ConnectionLostError,
        orderly: bool = False,
    ) -> None:
        """Fail all requests in flight and close the transport, once."""
        if self._why_lost is not None:
            return
        self._why_lost = why
        self._cause_of_loss = cause
        self._kind_of_loss = kind
        for timer in (self._timer, self._throttle_timer):
            if timer is not None:
                timer.cancel()
        in_flight = list(self._in_flight.values())
        self._in_flight.clear()
        for request in in_flight:
            if not request.response.done():
                request.response.set_exception(self._loss())
        self._pieces.clear()
        self._sendable.set()  # requests that wait learn that the connection has ended
        if self._transport is not None:
            if orderly:
                self._transport.close()
            else:
                self._transport.abort()

    def _loss(self) -> ConnectionLostError:
        """Return the error for a request that was sent too late, or not answered."""
        loss = self._kind_of_loss(self._why_lost or f"the connection to {self.address} is not open yet")
        loss.__cause__ = self._cause_of_loss
        return loss


def _discard(connected: tuple[Connection, Address]) -> None:
    connected[0].abort()


def _decoded(request: _InFlight, frame: bytes, at: int) -> Any:
    body = _begin_of_body(request, frame, at)
    if request.api is API_VERSIONS and frame[body : body + 2] == _UNSUPPORTED:
        try:
            return API_VERSIONS.decode(0, frame, body)  # the only version that any client can read
        except MalformedMessageError:  # librdkafka's mock cluster answers in a mixture of two
            return API_VERSIONS.decode(0, _UNSUPPORTED + bytes(4))
    return request.api.decode(request.version, frame, body)


def _skipped(request: _InFlight, frame: bytes, at: int) -> int:
    """Return the throttle time of a response that nobody waits for in milliseconds; 0 if it is not the first field."""
    if request.api.response[0].name != "throttle_ms":
        return 0
    body = _begin_of_body(request, frame, at)
    return int.from_bytes(frame[body : body + _LENGTH.size], "big", signed=True)


def _begin_of_body(request: _InFlight, frame: bytes, at: int) -> int:
    """Return the position behind the header of a response.

    Raises:
        MalformedMessageError: The header is damaged.
    """
    # A client must be able to read this response before it knows what the broker speaks.
    flexible = request.api.is_flexible(request.version) and request.api is not API_VERSIONS
    try:
        _, body = _RESPONSE_HEADER.codec(0, flexible=flexible).decode(frame, at)
    except (struct.error, IndexError) as error:
        raise MalformedMessageError(f"the header of the response is damaged: {error}") from error
    return body


@functools.cache
def api_versions() -> Request:
    """Return the request for a broker's versions, and for the features of its cluster."""
    return API_VERSIONS(software="aioshard", software_version=_software_version())


def _software_version() -> str:
    """Return our version in the characters that brokers accept (KIP-511)."""
    try:
        version = importlib.metadata.version("aioshard")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", version).strip("-.") or "0"
