"""Connections as they are before anything is said on them: TCP, TLS over it, or a Unix socket with its peer's user."""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress
from typing import Final

import anyio
from anyio.abc import ByteStream, SocketAttribute, SocketStream
from anyio.streams.tls import TLSStream

from kvlink.config import ClusterConfig, parse_address
from kvlink.credentials import check_user
from kvlink.errors import HandshakeError, StatusCode
from kvlink.wire import Refuse, encode

_NOT_TLS: Final = frozenset(
    {"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "BAD_RECORD_TYPE"}
)
"""What OpenSSL, in its several versions, makes of a plain hello."""
_EXPECTS_TLS: Final = Refuse(
    status=int(StatusCode.LLM_LINK_FAILED), field="tls", text="TLS is expected here: set ClusterConfig.tls_client there"
)


async def connect(address: str, config: ClusterConfig) -> ByteStream:
    """Dial an address; the caller owns the connection.

    Raises:
        OSError: nobody is there.
        LinkError: somebody is, and it is another user's process, or TLS fails.
    """
    parsed = parse_address(address)
    if parsed.path:
        stream: SocketStream = await anyio.connect_unix(parsed.path)
    else:
        stream = await anyio.connect_tcp(parsed.host, parsed.port)
    try:
        return await _secure(stream, config.tls_client, config, hostname=parsed.host)
    except BaseException:
        await hang_up(stream)
        raise


async def welcome(stream: SocketStream, config: ClusterConfig) -> ByteStream:
    """Return a connection that came in, ready to be spoken on; it stays the caller's to close.

    Raises:
        LinkError: it comes from another user's process, or TLS fails.
    """
    return await _secure(stream, config.tls_server, config, hostname=None)


async def _secure(
    stream: SocketStream, context: ssl.SSLContext | None, config: ClusterConfig, *, hostname: str | None
) -> ByteStream:
    if stream.extra(SocketAttribute.family) == socket.AF_UNIX:
        check_user(stream.extra(SocketAttribute.raw_socket), config.allowed_uids)
        return stream
    if context is None:
        return stream
    try:
        # Our own goodbye says that a link ends in good order, so TLS need not say it again.
        return await TLSStream.wrap(
            stream,
            server_side=hostname is None,
            hostname=hostname,
            ssl_context=context,
            standard_compatible=False,
        )
    except (ssl.SSLError, ssl.CertificateError, anyio.EndOfStream, anyio.BrokenResourceError) as exc:
        ours, theirs = ("tls_server", "tls_client") if hostname is None else ("tls_client", "tls_server")
        if hostname is None and isinstance(exc, ssl.SSLError) and exc.reason in _NOT_TLS:
            with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                await stream.send(encode(_EXPECTS_TLS))
        raise HandshakeError(
            f"TLS failed ({str(exc) or 'the peer hung up'}); check ClusterConfig.{ours} here and {theirs} there",
            phase="hello",
        ) from exc


async def hang_up(stream: ByteStream) -> None:
    """Close a connection now, whatever state it is in."""
    with anyio.CancelScope(shield=True), suppress(OSError):
        await anyio.aclose_forcefully(stream)


def origin(stream: ByteStream) -> str:
    """Return how to name a connection that came in."""
    # A connection that was reset at once has no address any more; uvloop says so with an AttributeError.
    with suppress(anyio.TypedAttributeLookupError, OSError, IndexError, AttributeError):
        remote = stream.extra(SocketAttribute.remote_address)
        if isinstance(remote, tuple):
            return f"the peer at {remote[0]}:{remote[1]}"
    return "the peer on a Unix socket"
