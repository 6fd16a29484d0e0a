"""Log in to a broker with SASL; aiokafka's authenticators compute what is sent."""

import asyncio
from collections.abc import Callable
from typing import Any, Final

from aiokafka.conn import (
    OAuthAuthenticator,
    SaslGSSAPIAuthenticator,
    SaslPlainAuthenticator,
    ScramAuthenticator,
)

from aioshard.kafka.wire.errors import (
    AuthenticationFailedError,
    BrokerError,
    ConnectionLostError,
    UnsupportedMechanismError,
)
from aioshard.kafka.wire.notation import Request
from aioshard.kafka.wire.options import ConnectionOptions
from aioshard.kafka.wire.requests import SASL_AUTHENTICATE, SASL_HANDSHAKE

_UNSUPPORTED_MECHANISM, _ILLEGAL_STATE, _AUTHENTICATION_FAILED = 33, 34, 58
_GIVE_UP: Final = b"\x01"
"""Ends a login with OAUTHBEARER that the broker has rejected; the response to it has the error code (RFC 7628)."""


async def log_in(send: Callable[[Request], "asyncio.Future[Any]"], options: ConnectionOptions, host: str) -> float:
    """Log in, and return the seconds after which the broker wants another login (KIP-368); 0 if never.

    Args:
        send: Sends a request on the new connection.
        options: The mechanism and the credentials.
        host: The name of the broker, as in its Kerberos principal.

    Raises:
        UnsupportedMechanismError: The listener does not offer the mechanism.
        AuthenticationFailedError: The broker rejected the credentials, or its proof that it knows them is wrong.
        ConnectionLostError: The connection was lost, or the token provider failed.
        BrokerError: Any other error code.
    """
    mechanism = options.sasl_mechanism
    handshake = await send(SASL_HANDSHAKE(mechanism=mechanism))
    if handshake.error in {_UNSUPPORTED_MECHANISM, _ILLEGAL_STATE}:
        offered = ", ".join(handshake.mechanisms or ()) or "none"
        raise UnsupportedMechanismError(f"{host} does not offer SASL mechanism {mechanism}; it offers {offered}")
    if handshake.error:
        raise _refusal(handshake.error, None, host)
    authenticator = _authenticator(options, host)
    received: bytes | None = None
    lifetime = 0.0
    while True:
        message = await _next_message(authenticator, received, options, host)
        if message is None:
            if not (mechanism == "OAUTHBEARER" and received):
                return lifetime
            message = _GIVE_UP
        response = await send(SASL_AUTHENTICATE(content=message))
        if response.error:
            raise _refusal(response.error, response.message, host)
        received = response.content or b""
        lifetime = (response.lifetime_ms or 0) / 1000
        if message is _GIVE_UP:
            raise AuthenticationFailedError(f"{host} rejected the token")


def _authenticator(options: ConnectionOptions, host: str) -> Any:
    """Return the side of the client in the dialogue of the mechanism."""
    loop = asyncio.get_running_loop()
    if options.sasl_mechanism == "OAUTHBEARER":
        return OAuthAuthenticator(sasl_oauth_token_provider=options.token_provider)
    if options.sasl_mechanism == "GSSAPI":
        domain = options.kerberos_domain_name or host
        return SaslGSSAPIAuthenticator(loop=loop, principal=f"{options.kerberos_service_name}@{domain}")
    login = {"sasl_plain_username": options.sasl_username, "sasl_plain_password": options.sasl_password}
    if options.sasl_mechanism == "PLAIN":
        return SaslPlainAuthenticator(loop=loop, **login)
    return ScramAuthenticator(loop=loop, sasl_mechanism=options.sasl_mechanism, **login)


async def _next_message(
    authenticator: Any, received: bytes | None, options: ConnectionOptions, host: str
) -> bytes | None:
    """Return what to send next; None when the dialogue is over."""
    try:
        step: tuple[bytes, bool] | None = await authenticator.step(received)
    except Exception as error:  # of the authenticator, of Kerberos or of the user's token provider
        text = f"the login at {host} failed on our side: {type(error).__name__}: {error}".rstrip(": ")
        if options.sasl_mechanism == "OAUTHBEARER":
            raise ConnectionLostError(text) from error  # the provider asks a server, which may answer later
        raise AuthenticationFailedError(text) from error
    return None if step is None else step[0]


def _refusal(code: int, message: str | None, host: str) -> AuthenticationFailedError | BrokerError:
    """Return the error for an error code in a response."""
    text = f"{host} refused the login: {message or f'error code {code}'}"
    if code == _AUTHENTICATION_FAILED:
        return AuthenticationFailedError(text)
    return BrokerError(code, text, retriable=True)
